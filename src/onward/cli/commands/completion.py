"""onward completion: a script that lets the shell complete commands, options and their values."""

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import ClassVar, Literal

from onward.cli import module_of
from onward.cli.overview import COMMANDS
from onward.cli.shared.arguments import Argument, arguments
from onward.cli.shared.options import parse

ABOUT = """\
Print a shell script that completes commands, options and their values.

examples:
  onward completion bash > ~/.local/share/bash-completion/completions/onward
  eval "$(onward completion zsh)"        in ~/.zshrc, after compinit
  onward completion fish > ~/.config/fish/completions/onward.fish
"""
SCRIPT = """\
_onward() {
    local %s choices
    if [ "$number" = 1 ]; then
        choices=%s
    else
        case "$command $previous" in
%s
        esac
        if [ -z "$choices" ]; then case "$command $current" in
%s
        esac; fi
    fi
    %s
}
%s"""
SHELLS = {  # code that reads the words of the command line, offers the choices, and registers the function
    "bash": (
        "current=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} previous=${COMP_WORDS[COMP_CWORD-1]} "
        "number=$COMP_CWORD",
        'COMPREPLY=($(compgen -W "$choices" -- "$current"))',
        "complete -o bashdefault -o default -F _onward onward",
    ),
    "zsh": (
        "current=${words[CURRENT]} command=${words[2]} previous=${words[CURRENT-1]} number=$((CURRENT-1))",
        'if [ -n "$choices" ]; then compadd -- ${=choices}; else _files; fi',
        "compdef _onward onward",
    ),
}


@dataclass(frozen=True)
class Options:
    """The options of `onward completion`, which prints a completion script."""

    positional: ClassVar[tuple[str, ...]] = ("shell",)
    shell: Literal["bash", "zsh", "fish"]  # shell for which the script is written


def main(argv: Sequence[str]) -> None:
    shell = parse(Options, argv, prog="onward completion", about=ABOUT).shell
    print(fish() if shell == "fish" else script(*SHELLS[shell]))


def tables() -> dict[str, list[Argument]]:
    """The arguments of every command."""
    return {name: list(arguments(module_of(name).Options)) for name in COMMANDS}


def script(words: str, offer: str, announce: str) -> str:
    """Return the script for bash or zsh. The arguments are the code in which the two differ: `words` reads the typed
    words, `offer` offers the candidates, `announce` registers the script with the shell."""
    values, options = [], []
    for command, table in tables().items():
        flags = [argument.flag for argument in table if not argument.positional]
        options.append(f"            {command}\\ -*) choices={quote(' '.join([*flags, '--help']))} ;;")
        for argument in table:
            if argument.choices:
                previous = command if argument.positional else argument.flag
                values.append(f"            {command}\\ {previous}) choices={quote(' '.join(argument.choices))} ;;")
    commands = quote(" ".join(COMMANDS))
    return SCRIPT % (words, commands, "\n".join(values), "\n".join(options), offer, announce)


def fish() -> str:
    lines = [f"complete -c onward -n __fish_use_subcommand -a {quote(c)} -d {quote(d)}" for c, d in COMMANDS.items()]
    for command, table in tables().items():
        begin = f"complete -c onward -n '__fish_seen_subcommand_from {command}'"
        for argument in table:
            values = f" -a {quote(' '.join(argument.choices))}" if argument.choices else ""
            if not argument.positional:
                value = "" if argument.is_switch else " -r"
                lines.append(f"{begin} -l {argument.flag[2:]}{value}{values} -d {quote(argument.help)}")
            elif values:
                lines.append(begin + values)
    return "\n".join(lines)
