"""Finding the configuration, and telling people what is wrong with theirs in one sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lgmml_torch.checks import ConfigError, did_you_mean


def config_dir() -> Path:
    """The folder of the configuration: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def load_config(overrides: Sequence[str] = (), *, name: str = "train", folder: Path | None = None) -> DictConfig:
    """Compose the configuration ``name`` of a folder, this package's own by default, without running anything.

    Raises:
        ConfigError: for an unknown key or choice, with a suggestion.
    """
    GlobalHydra.instance().clear()
    folder = config_dir() if folder is None else folder
    with initialize_config_dir(str(folder), version_base="1.3"):
        try:
            return compose(name, overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_sentence(error, overrides, name, folder)) from error


def check_overrides(overrides: Sequence[str]) -> None:
    """Check the command line before Hydra does, which would answer with a traceback.

    Raises:
        ConfigError: as in `load_config`.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    single = [text for text, item in zip(overrides, parsed, strict=True) if not item.is_sweep_override()]
    load_config([text for text in single if not text.lstrip("+~").startswith("hydra")])


def _one_sentence(error: Exception, overrides: Sequence[str], name: str, folder: Path) -> str:
    text = " ".join(str(error).split())
    key = re.search(r"Could not override '([^']+)'", text)
    if key is not None:
        return f"unknown setting {key[1]!r}{_suggested(key[1], _known_keys(overrides, name, folder))}"
    choice = re.search(
        r"Could not find '([^']+)' Available options in '([^']+)': (.*?)(?: Config search path.*)?$", text
    )
    if choice is not None:
        options = choice[3].split()
        word = choice[1].rsplit("/", 1)[-1]
        return f"{choice[2]} has no choice {word!r}{did_you_mean(word, options)} (there are: {', '.join(options)})"
    group = re.search(r"Could not override '([^']+)'\. No match in the defaults list", text)
    return f"unknown part {group[1]!r}" if group is not None else text


def _suggested(key: str, known: list[str]) -> str:
    """A key of the same name elsewhere, or else one spelt alike."""
    leaf = key.rpartition(".")[2]
    moved = [other for other in known if other.rpartition(".")[2] == leaf]
    return f"; did you mean {moved[0]!r}?" if moved else did_you_mean(key, known)


def _known_keys(overrides: Sequence[str], name: str, folder: Path) -> list[str]:
    """Every dotted key there is, with the parts chosen that can be chosen."""
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    chosen = [text for text in overrides if text.split("=")[0] in groups]
    try:
        config = compose(name, overrides=chosen)
    except HydraException:
        config = compose(name)
    keys = [*groups]

    def walk(node: dict[Any, Any], prefix: str) -> None:
        for key, child in node.items():
            keys.append(f"{prefix}{key}")
            if isinstance(child, dict):
                walk(child, f"{prefix}{key}.")

    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    walk(content, "")
    return keys
