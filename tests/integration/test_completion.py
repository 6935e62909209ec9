"""Completion in the shells that docs/start-here.md names: commands, subcommands, options and choices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# What is typed → what completion offers among others.
CASES = {
    "netweight comp": "compress",
    "netweight forget det": "detect",
    "netweight compress --lev": "--level",
    "netweight compress --level hi": "high",
}
# A program of each shell that completes the words of $TYPED as the shell does when Tab is pressed.
PROGRAMS = {
    "bash": """
        eval "$(_NETWEIGHT_COMPLETE=bash_source netweight)"
        complete -p netweight >/dev/null || exit 1
        COMP_WORDS=($TYPED); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _netweight_completion netweight
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        autoload -U compinit; compinit -u -D
        eval "$(_NETWEIGHT_COMPLETE=zsh_source netweight)"
        whence _netweight_completion >/dev/null || exit 1
        words=(${=TYPED}); CURRENT=${#words}
        compadd() { print -l -- $@ ${(P)@[-1]} ${completions} ; }
        _describe() { print -l -- ${(P)@[-2]} ${(P)@[-1]} ; }
        _netweight_completion
    """,
    "fish": """
        _NETWEIGHT_COMPLETE=fish_source netweight | source
        complete --do-complete "$TYPED"
    """,
}


# What is offered is told by one function for all shells; what a shell does with it differs by kinds of words.
@pytest.mark.parametrize(
    ("shell", "typed"), [(shell, typed) for shell in PROGRAMS for typed in list(CASES)[:: 1 if shell == "bash" else 3]]
)
def test_a_shell_completes(shell, typed, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    if not (BIN / "netweight").is_file():
        pytest.skip("the command netweight is not installed")
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path), "TYPED": typed, "TERM": "dumb"}
    options = ["-f"] if shell == "zsh" else []
    done = subprocess.run(
        [program, *options, "-c", PROGRAMS[shell]], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    offered = {word.partition(":")[0] for line in done.stdout.splitlines() for word in line.split()[:1]}
    assert CASES[typed] in offered, done.stdout + done.stderr
