"""The names a user needs, and where they are; `__init__.py` reads this list."""

from lgmml_torch.data.catalog import open_dataset as open_dataset
from lgmml_torch.data.catalog import open_table as open_table
from lgmml_torch.data.letor import load_letor as load_letor
from lgmml_torch.data.letor import load_letor_splits as load_letor_splits
from lgmml_torch.data.letor import load_lightgbm as load_lightgbm
from lgmml_torch.data.source import open_source as open_source
from lgmml_torch.data.write import save_letor as save_letor
from lgmml_torch.data.write import save_table as save_table
from lgmml_torch.estimator import LGMMLRanker as LGMMLRanker
from lgmml_torch.evaluation.evaluate import Evaluation as Evaluation
from lgmml_torch.evaluation.evaluate import evaluate as evaluate
from lgmml_torch.evaluation.metric import RankingMetrics as RankingMetrics
from lgmml_torch.fitting.boosted import fit_boosted as fit_boosted
from lgmml_torch.fitting.sampled import fit_sampled as fit_sampled
from lgmml_torch.fitting.trained import start_trained as start_trained
from lgmml_torch.functional.gmml import gmml as gmml
from lgmml_torch.functional.ranking.measures import average_precision as average_precision
from lgmml_torch.functional.ranking.measures import dcg as dcg
from lgmml_torch.functional.ranking.measures import err as err
from lgmml_torch.functional.ranking.measures import ndcg as ndcg
from lgmml_torch.functional.ranking.measures import precision as precision
from lgmml_torch.functional.ranking.measures import rank_metrics as rank_metrics
from lgmml_torch.functional.ranking.measures import recall as recall
from lgmml_torch.functional.ranking.measures import reciprocal_rank as reciprocal_rank
from lgmml_torch.functional.spd import geometric_mean as geometric_mean
from lgmml_torch.models.combine import merge_models as merge_models
from lgmml_torch.models.explain import Explanation as Explanation
from lgmml_torch.models.explain import explain as explain
from lgmml_torch.models.importance import Importance as Importance
from lgmml_torch.models.importance import pair_importance as pair_importance
from lgmml_torch.models.importance import partial_effect as partial_effect
from lgmml_torch.models.importance import permutation_importance as permutation_importance
from lgmml_torch.models.importance import structural_importance as structural_importance
from lgmml_torch.models.local_metrics import LocalMetrics as LocalMetrics
from lgmml_torch.models.local_metrics import MetricBlock as MetricBlock
from lgmml_torch.models.phi import Phi as Phi
from lgmml_torch.models.preprocess.base import Preprocess as Preprocess
from lgmml_torch.models.preprocess.compose import all_views as all_views
from lgmml_torch.models.preprocess.compose import build_preprocess as build_preprocess
from lgmml_torch.models.preprocess.compose import list_rank_features as list_rank_features
from lgmml_torch.models.ranker import LGMML as LGMML
from lgmml_torch.ragged import RankingData as RankingData
from lgmml_torch.training.batches import RankingDataModule as RankingDataModule
from lgmml_torch.training.module import LGMMLModule as LGMMLModule

__version__: str
