"""What a command works on: a user's step by `SCRIPT.py:function`, or a model by name.

Beside the step the script says what to trace it with, under the name `example_arguments`: a tuple,
or a function without parameters that returns one. A function is evaluated on shapes alone, so that
a model of any size takes no memory:

    def example_arguments():
        return create_state(jax.random.key(0)), {"x": jnp.zeros((32, 64)), "y": jnp.zeros((32, 64))}

The step may be plain or decorated; a decorator's settings hold where the command line says nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hetpass.errors import HetpassError, ToolError
from hetpass.ir.records import nearest
from hetpass.tools.models.names import SIZES

EXAMPLE = "example_arguments"


@dataclass(frozen=True)
class Target:
    """A step and what to trace it with.

    Attributes:
      name: as typed.
      step: a plain function, or what `het_parallelize` made of one.
      arguments: arrays or shapes.
      note: what the target is, in words.
    """

    name: str
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    note: str = ""


def declare_target(parser: ArgumentParser, *, optional: bool = False) -> None:
    """The arguments that name a step; with `optional` there need be none."""
    parser.add_argument(
        "step",
        metavar="STEP",
        nargs="?" if optional else None,
        help="SCRIPT.py:function, module:function, or a model: gpt-2.6B, llama-8B, moe-1.3B, "
        "wresnet-500M, …",
    )
    parser.add_argument(
        "--arguments",
        metavar="NAME",
        default=EXAMPLE,
        help=f"what the script calls the step's example arguments; default: {EXAMPLE}",
    )
    parser.add_argument("--batch", type=int, metavar="B", help="examples in a step, of a model")
    parser.add_argument("--dtype", metavar="TYPE", help="of a model's computation; default float16")


def load_target(arguments: Namespace) -> Target:
    """The step that a command line names.

    Raises:
      ToolError: HP-TOOL-MODEL, -SCRIPT, -FUNCTION or -ARGUMENTS.
    """
    text: str = arguments.step
    if ":" not in text:
        return _model(text, arguments)
    if arguments.batch or arguments.dtype:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            "--batch and --dtype are for models by name",
            where=text,
            ways_out=[f"set them in what {arguments.arguments} returns"],
        )
    place, _, name = text.rpartition(":")
    module = _module(place)
    step = _attribute(module, name, text)
    if not callable(step):
        raise ToolError(
            "HP-TOOL-FUNCTION",
            f"{name} is a {type(step).__name__}, not a step",
            where=text,
            ways_out=["name a function of arrays"],
        )
    return Target(text, step, _arguments(module, arguments.arguments, text))


def _model(name: str, arguments: Namespace) -> Target:
    if name not in SIZES:
        script = name.endswith(".py")
        raise ToolError(
            "HP-TOOL-MODEL",
            f"{name!r} names no model" + (": a script needs a function" if script else ""),
            where="STEP",
            ways_out=[f"{name}:train_step"] if script else nearest(name, SIZES),
        )
    if arguments.batch is not None and arguments.batch < 1:
        raise ToolError(
            "HP-TOOL-ARGUMENTS", f"a batch of {arguments.batch} examples", where="--batch",
            ways_out=["a whole number of at least 1"],
        )  # fmt: skip
    dtypes = ("float32", "bfloat16", "float16")
    if arguments.dtype not in (None, *dtypes):
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"{arguments.dtype!r} is no type that a model computes in",
            where="--dtype",
            ways_out=nearest(arguments.dtype, dtypes),
        )
    from hetpass.tools.models.steps import model_step

    model = model_step(name, arguments.batch, arguments.dtype)
    note = f"{name}: {model.parameter_count:,} parameters"
    return Target(name, model.step, (model.state, model.batch), note)


def _module(place: str) -> ModuleType:
    """Runs a script as a module; its own folder is searched for what it imports."""
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise ToolError(
                "HP-TOOL-SCRIPT", "there is no such script", where=place,
                ways_out=["give the path of a Python file: SCRIPT.py:function"],
            )  # fmt: skip
        spec = importlib.util.spec_from_file_location(f"hetpass_script_{path.stem}", path)
        if spec is None or spec.loader is None:  # a .py file always has a loader
            raise AssertionError(path)
        module = importlib.util.module_from_spec(spec)
        loader = spec.loader
        sys.path.insert(0, str(path.parent.resolve()))
        sys.modules[spec.name] = module
        _run(lambda: loader.exec_module(module), place)
        return module
    sys.path.insert(0, str(Path.cwd()))
    module = _run(lambda: importlib.import_module(place), place)
    return cast(ModuleType, module)


def _run(function: Callable[[], Any], place: str) -> Any:
    """Runs a user's code; an error in it is told with the user's own line."""
    try:
        return function()
    except HetpassError:
        raise
    except (Exception, SystemExit) as error:
        frame = _own_frame(error, place)
        raise ToolError(
            "HP-TOOL-SCRIPT",
            f"the script ended with {type(error).__name__}: {str(error)[:300]}",
            where=frame or place,
            ways_out=[
                "run it by itself: python " + place if place.endswith(".py") else f"import {place}",
                'keep what is not needed to define the step under if __name__ == "__main__":',
            ],
        ) from error


def _own_frame(error: BaseException, place: str) -> str:
    """The last line of the user's file in a traceback."""
    found = ""
    trace = error.__traceback__
    stem = Path(place).name
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if Path(file).name == stem:
            found = f"{place}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _attribute(module: ModuleType, name: str, text: str) -> Any:
    if not hasattr(module, name):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ToolError(
            "HP-TOOL-FUNCTION",
            f"the script has no {name!r}",
            where=text,
            ways_out=nearest(name, functions) or ["define the step at the top level of the script"],
        )
    return getattr(module, name)


def _arguments(module: ModuleType, name: str, text: str) -> tuple[Any, ...]:
    if not hasattr(module, name):
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"the script does not say what to trace the step with: it has no {name!r}",
            where=text,
            ways_out=[
                f"def {name}(): return state, batch",
                "--arguments NAME, if they have another name",
            ],
        )
    value = getattr(module, name)
    if callable(value):
        value = _on_shapes(value, text)
    if not isinstance(value, tuple):
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"{name} gives a {type(value).__name__}, not the tuple of the step's arguments",
            where=text,
            ways_out=["return state, batch"],
        )
    return value


def _on_shapes(make: Callable[[], Any], text: str) -> Any:
    import jax

    place = text.rpartition(":")[0]
    if inspect.signature(make).parameters:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            f"{getattr(make, '__name__', 'the function')} takes parameters",
            where=text,
            ways_out=["a function without parameters that returns the step's arguments"],
        )
    try:
        return jax.eval_shape(make)
    except Exception:  # it looks at values, or returns what is no array: once more, for real
        return _run(make, place)
