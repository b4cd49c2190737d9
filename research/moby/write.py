"""The files of the set: three tables, the names of the features and a page about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lgmml_torch.checks import DataError
from lgmml_torch.data.columns import require_arrow
from lgmml_torch.files import replacing, write_text
from research.moby.build import Part
from research.moby.families import SHARES
from research.moby.features import FEATURES
from research.moby.sources import Sources
from research.moby.thesaurus import DISTRACTORS, FEWEST_DISTRACTORS, FEWEST_LISTED, LISTED
from research.stats import markdown

ROW_GROUP = 65_536

PAGE = """# Which words does a thesaurus list for this word?

A ranking set made of the Moby thesaurus and WordNet by `python -m research.moby`.

A query is a root word of the thesaurus. Its documents are up to {listed} words drawn from its list, and up to
{distractors} words that stand two steps away: listed by words it lists, but neither listed by it nor listing it. Within
each kind all words have equal chances. Root words with fewer than {fewest_listed} listed words or fewer than
{fewest_distractors} words two steps away are no queries. Capitals do not count.

- Grade 2: query and document list each other.
- Grade 1: the query lists the document; the document does not list the query, often because it is no root word.
- Grade 0: two steps away.

{counts}

The queries of one word family never stand on two sides: root words whose first words have the same stem, or that
WordNet derives from one another and that start with the same three letters, are one family, and families are cut
{shares} into training, validation and test. Documents are not cut: a word may be met with queries of every part, and a
pair of words that list each other may be met from one end in training and from the other in a test.

Seed {seed}, {queries:,} training queries asked for; thesaurus: {moby}; WordNet: {wordnet}.

## Files

`train.parquet`, `vali.parquet` and `test.parquet` hold a row per document, lists one after the other, documents in the
order of the alphabet: `qid` (the query itself), `docid` (the document itself), `label`, and the features, whose names
stand in `features.txt`, too. To open them:

```python
from lgmml_torch.data.catalog import open_dataset

parts = open_dataset("{folder}")  # train, valid and test
```

or `python train.py data=table data.path={folder}`.

## Features

None of them knows the thesaurus. Features that take WordNet are 0 where it does not know a word, which
`document_missing` and `query_missing` tell.

{features}

## Licences

The Moby thesaurus, by Grady Ward, is in the public domain. The features come from WordNet, which may be used, copied,
changed and passed on for any purpose and without fee as long as its notice of copyright and its disclaimer go with it:
WordNet, copyright Princeton University, all rights reserved, provided "as is" and without any warranty; the name of
Princeton University may not be used in advertising. The full text is the file LICENSE of WordNet.
"""


def check_output(folder: Path) -> None:
    """Refuse, before any work is done, a place that cannot be written to."""
    require_arrow()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--output must name a folder that can be made, got {folder} ({error.strerror})") from None


def write_set(parts: dict[str, Part], folder: Path, sources: Sources, *, seed: int, queries: int) -> None:
    """Write all files; what is there under the same names is replaced."""
    for name, part in parts.items():
        write_part(part, folder / f"{name}.parquet")
    write_text(folder / "features.txt", "".join(f"{name}\n" for name in FEATURES))
    page = PAGE.format(
        listed=LISTED,
        distractors=DISTRACTORS,
        fewest_listed=FEWEST_LISTED,
        fewest_distractors=FEWEST_DISTRACTORS,
        counts=count_table(parts),
        shares="/".join(f"{100 * share:.0f}" for share in SHARES.values()),
        seed=seed,
        queries=queries,
        moby=sources.moby_name,
        wordnet=sources.wordnet_name,
        folder=folder,
        features=markdown(["feature", "meaning"], [[f"`{name}`", text] for name, text in FEATURES.items()]),
    )
    write_text(folder / "README.md", page)


def write_part(part: Part, path: Path) -> None:
    """Write a table with a row per document."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "qid": pa.array(part.queries, pa.string()),
        "docid": pa.array(part.documents, pa.string()),
        "label": pa.array(part.labels),
    }
    for number, name in enumerate(FEATURES):
        columns[name] = pa.array(np.ascontiguousarray(part.features[:, number]))
    with replacing(path) as temporary:
        parquet.write_table(pa.table(columns), temporary, compression="zstd", row_group_size=ROW_GROUP)


def count_table(parts: dict[str, Part]) -> str:
    """Queries, documents and shares of the grades, part by part, as Markdown."""
    rows = []
    for name, part in parts.items():
        share = np.bincount(part.labels, minlength=3) / len(part.labels)
        grades = [f"{100 * value:.1f}%" for value in share]
        rows.append([f"`{name}.parquet`", f"{part.num_queries:,}", f"{len(part.labels):,}", *grades])
    return markdown(["file", "queries", "documents", "grade 0", "grade 1", "grade 2"], rows)
