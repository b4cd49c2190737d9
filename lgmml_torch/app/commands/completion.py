"""``lgmml completion``: a script with which bash or zsh completes commands, options, their values and settings.

It is made of the parser and the folder of the configuration as they are, so it knows nothing of its own. Where it has
nothing to offer, the shell offers files.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path

from lgmml_torch.app.start import config_dir
from lgmml_torch.app.words import build_parser, parsers_of

# bash takes `data=mq` apart into three words, zsh does not: the first branch is for both.
SCRIPT = """\
_lgmml() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" key="" lead="" words=""
    if [[ $word == *=* && $word != "=" ]]; then key="${{word%%=*}}" lead="${{word%%=*}}=";
    elif [[ $word == "=" ]]; then key="$before" word="";
    elif [[ $before == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if [[ $COMP_CWORD == 1 ]]; then words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        *) case "${{COMP_WORDS[1]}} $key" in
{settings}
        "train "|"sweep ") words="{keys}"; compopt -o nospace 2>/dev/null;;
        esac;;
        esac
        if [[ $word == -* ]]; then
            case "${{COMP_WORDS[1]}}" in
{options}
            esac
        fi
    fi
    COMPREPLY=()
    local each
    for each in $words; do
        [[ $each == "${{word#"$lead"}}"* ]] || continue
        [[ $each == *= ]] || each="$each{end}"
        COMPREPLY+=("$lead$each")
    done
}}
complete {how} -F _lgmml lgmml
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
# No space is to follow `data=`. bash can be told for one answer, zsh only for all: there words bring their own.
ENDS = {"bash": {"how": "-o default", "end": ""}, "zsh": {"how": "-o nospace -o default", "end": " "}}


def run(args: Namespace) -> None:
    """Write the script to standard output."""
    sys.stdout.write((ZSH if args.shell == "zsh" else "") + script(args.shell, config_dir()))


def script(shell: str, folder: Path) -> str:
    """What the shell is to do; ``folder`` is that of the configuration."""
    parser = build_parser()
    commands = parsers_of(parser)
    options, values = [], []
    for name, command in commands.items():
        own = [action for action in command._actions if action.option_strings]
        options.append(_case([name], [word for action in own for word in action.option_strings if word[:2] == "--"]))
        for action in command._actions:
            before = [f"{name} {word}" for word in action.option_strings or [name]]
            values += [_case(before, list(map(str, action.choices)))] if action.choices else []
    groups = {
        part.name: sorted(file.stem for file in part.glob("*.yaml")) for part in folder.iterdir() if part.is_dir()
    }
    settings = [_case([f"train {key}", f"sweep {key}"], parts) for key, parts in sorted(groups.items())]
    plain = re.findall(r"^(\w+): +[^\s#]", (folder / "train.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return SCRIPT.format(
        **ENDS[shell],
        commands=" ".join([*commands, "--help", "--version"]),
        options="\n".join(options),
        values="\n".join(values),
        settings="\n".join(settings),
        keys=" ".join(f"{key}=" for key in sorted({*groups, *plain} - {"chosen"})),  # which the run fills in
    )


def _case(matches: list[str], words: list[str]) -> str:
    return f'        {"|".join(f"{match!r}" for match in matches)}) words="{" ".join(words)}";;'
