"""Generate completion scripts for bash, zsh and fish: static text from the parsers, so Tab runs nothing.

zsh reads the bash script through its own bashcompinit. fish gets a line per flag, with its description.
"""

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from tandem.config.arguments import Parser
from tandem.config.fields import words_in
from tandem.config.settings import SETTINGS

BASH = """\
# tandem completion {shell}: {how}
{begin}_tandem() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$word" = "=" ]; then word=; elif [ "$before" = "=" ]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    else
        case "$before" in
{values}
        *) case "${{COMP_WORDS[1]}} $COMP_CWORD" in
{positionals}
            esac
            case "$word" in -*) case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;; esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tandem tandem
"""
HOW = {
    "bash": "tandem completion bash > ~/.local/share/bash-completion/completions/tandem",
    "zsh": "tandem completion zsh > ~/.tandem.zsh, and `source ~/.tandem.zsh` in ~/.zshrc after compinit",
    "fish": "tandem completion fish > ~/.config/fish/completions/tandem.fish",
}
ZSH = "autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"


class Flag(NamedTuple):
    """One flag of a verb. `values`: the words it accepts, if they can be listed."""

    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...]


def script(shell: str, parsers: Mapping[str, Parser], summaries: Mapping[str, str]) -> str:
    """Return the completion script of `tandem` for this shell."""
    flags = {verb: flags_of(parser) for verb, parser in parsers.items()}
    first = {verb: words for verb, parser in parsers.items() if (words := _first_words(parser))}
    if shell == "fish":
        return _fish(flags, first, summaries)
    values: dict[str, set[str]] = {}
    for each in (flag for of_verb in flags.values() for flag in of_verb):
        if each.values:
            # The script's case has one row per flag, and a flag such as --format can have other values in
            # another verb.
            values.setdefault(each.name, set()).update(each.values)
    return BASH.format(
        shell=shell,
        how=HOW[shell],
        begin=ZSH if shell == "zsh" else "",
        verbs=" ".join(flags),
        values="\n".join(
            f'        {name}) words="{" ".join(sorted(words))}" ;;' for name, words in values.items()
        ),
        positionals="\n".join(
            f'            "{verb} 2") words="{" ".join(words)}" ;;' for verb, words in first.items()
        ),
        flags="\n".join(
            f'            {verb}) words="{" ".join(flag.name for flag in of_verb)}" ;;'
            for verb, of_verb in flags.items()
        ),
    )


def flags_of(parser: Parser) -> list[Flag]:
    """Return all flags in the parser's help, and --help."""
    by_flag = {setting.flag: setting for setting in SETTINGS.values()}
    found = [Flag("--help", "what this verb takes", False, ())]
    # argparse has no public list of a parser's arguments.
    for action in parser._actions:
        # `--task.NAME` is a placeholder that no one can type.
        for name in (each for each in action.option_strings if not each.endswith(".NAME")):
            setting = by_flag.get(name)
            words = tuple(map(str, action.choices or ())) or (words_in(setting.annotation) if setting else ())
            text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).partition("\n")[0]
            found.append(Flag(name, text.replace("%%", "%"), action.nargs != 0, words))
    return found


def _first_words(parser: Parser) -> tuple[str, ...]:
    """Return the words that the first argument accepts, if they can be listed."""
    positionals = [action for action in parser._actions if not action.option_strings]
    return tuple(map(str, positionals[0].choices or ())) if positionals else ()


def _fish(
    flags: Mapping[str, list[Flag]], first: Mapping[str, tuple[str, ...]], summaries: Mapping[str, str]
) -> str:
    lines = [f"# tandem completion fish: {HOW['fish']}"]
    for verb in flags:
        summary = _quoted(summaries[verb])
        lines.append(f"complete -c tandem -n __fish_use_subcommand -f -a {verb} -d {summary}")
    for verb, of_verb in flags.items():
        seen = f"complete -c tandem -n '__fish_seen_subcommand_from {verb}'"
        if verb in first:
            lines.append(f"{seen} -f -a {_quoted(' '.join(first[verb]))}")
        for flag in of_verb:
            dashes = "-l" if flag.name.startswith("--") else "-s"
            line = f"{seen} {dashes} {flag.name.lstrip('-')} -d {_quoted(flag.help)}"
            if flag.values:
                line += f" -x -a {_quoted(' '.join(flag.values))}"
            lines.append(line + (" -r" if flag.takes_value and not flag.values else ""))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # fish reads backslashes inside single quotes, unlike POSIX shells.
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
