"""What benchmarks share: their command line, and how results are written.

`netweight benchmark PART.NAME`, or `python -m netweight_experiments.benchmarks PART.NAME`, runs `main` of a script.
Parameters of `main` are options, those before `/` arguments; a `str` of an `Annotated` one is its help, another value
its choices; a `Literal` has its own. What `main` returns, or yields as it grows, is written beside what every result
says of itself; a script that takes `output` may look at what an earlier run has written there.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from netweight.core.environment import describe

# Where results are kept, from the root of the source tree.
RESULTS = Path("benchmarks") / "results"


def scripts() -> dict[str, str]:
    """Return PART.NAME → the first line of its docstring, of every benchmark that is a script; none is imported."""
    folder = Path(__file__).parent
    trees = {path.relative_to(folder): ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*/*.py")}
    return {
        ".".join(path.with_suffix("").parts): (ast.get_docstring(tree) or "").partition("\n")[0]
        for path, tree in sorted(trees.items())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def run(name: str, words: Sequence[str]) -> dict[str, Any] | None:
    """Run a script by the name of its module; return the result that was written, None without one."""
    import torch

    module = import_module(f"{__package__}.{name}")
    given = vars(parser_of(module.main, name, module.__doc__).parse_args(words))
    options = {key: value for key, value in given.items() if key != "output"}
    torch.set_num_threads(options.get("threads", 1))
    part, _, own = name.replace("_", "-").rpartition(".")
    flags = [key.replace("_", "-") for key, value in options.items() if value is True]
    output = given["output"] or RESULTS / part / f"{'-'.join([own, *flags])}-{today()}.json"
    head = about(name, str(module.__doc__), options)
    parameters = inspect.signature(module.main).parameters
    named = {key: value for key, value in {**options, "output": output}.items() if key in parameters}
    arguments = [named.pop(key) for key, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]
    found = module.main(*arguments, **named)
    result = None
    for measured in found if inspect.isgenerator(found) else [found] * (found is not None):
        result = head | measured | {"load_average_after": load()}
        write(output, result)
    if result is not None:
        print(f"Written: {output}", flush=True)
    return result


def parser_of(main: Callable[..., Any], name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script's options, with `--output`."""
    parser = argparse.ArgumentParser(
        f"python -m {__package__} {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="file of results; by default today's in benchmarks/results")
    hints = get_type_hints(main, include_extras=True)
    for key, one in inspect.signature(main).parameters.items():
        if key != "output":
            argument = key if one.kind is one.POSITIONAL_ONLY else f"--{key.replace('_', '-')}"
            parser.add_argument(argument, **_argument(one, hints[key], optional=argument != key))
    return parser


def _argument(one: inspect.Parameter, hint: Any, *, optional: bool) -> dict[str, Any]:
    """What argparse is told of a parameter."""
    how: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        how = {"help" if isinstance(each, str) else "choices": each for each in more}
    if hint is bool:
        return how | {"action": "store_true"}
    required, kind = one.default is one.empty, hint
    if get_origin(hint) not in (None, Literal):  # of a tuple its elements, and what may be None
        kind = get_args(hint)[0]
    if get_origin(kind) is Literal:
        how["choices"], kind = get_args(kind), str
    how |= {"type": kind, "default": None if required else one.default}
    if get_origin(hint) is tuple:
        how["nargs"] = "+" if required or one.default else "*"
    elif not optional and not required:
        how["nargs"] = "?"
    if "choices" in how:
        how["choices"] = tuple(how["choices"])
    return how | ({"required": required} if optional else {})


def about(name: str, doc: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every result says of itself: what it is, when, with which options and where it was made."""
    from netweight.codec import active_path

    told = {key: _told(value) for key, value in options.items()}
    where = {"environment": describe({"codec_path": active_path()}), "load_average": load()}
    return {"benchmark": name, "what": doc.splitlines()[0], "date": now(), "options": told, **where}


def _told(value: Any) -> Any:
    """An option as it is written: of a path, which says where something lies, its name, also where it came as text."""
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    if isinstance(value, str) and Path(value).is_absolute():
        value = Path(value)
    return value.name if isinstance(value, Path) else value


def today() -> str:
    """Return the date."""
    return datetime.date.today().isoformat()


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def load() -> list[float]:
    """Return the machine's load averages."""
    return [round(value, 2) for value in os.getloadavg()]


def peak_bytes() -> int:
    """Return the most memory of this process alone; what `getrusage` says begins with that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds that a piece of work takes."""
    started = clock()
    work()
    return clock() - started


def write(output: Path | None, result: Any) -> None:
    """Write a result as JSON if there is a file to write."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n")


def fill(output: Path, name: str, cells: Iterable[tuple[str, Callable[[], Any]]]) -> Iterator[dict[str, Any]]:
    """Measure the cells that a file of results lacks under a name; yield all of them after each."""
    found = json.loads(output.read_text()).get(name, {}) if output.exists() else {}
    for cell, measure in cells:
        if cell not in found:
            found[cell] = measure()
            print(cell, found[cell], flush=True)
            yield {name: found}
