"""Finds the class of a user's own model, and makes its fields keys of the configuration.

A start names the class by `model._target_`, on the command line or in a file of --config-dir, or
its script gives it to `fit(model=…)`. Only then is it imported: never because a run was saved with
it. Its fields replace the keys of the transformer in the schema with which Hydra composes, so they
are checked, shown and swept over as all keys are.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from parallel3d.cli.preset_files import experiment_files, own_presets
from parallel3d.cli.words import keys_of, option
from parallel3d.config.fields import REQUIRED, all_keys, allowed, check_value, sections_of, show
from parallel3d.config.values import key
from parallel3d.errors import UserError, first_line, nearest_hint, users_frame
from parallel3d.models.survey import TARGET, OwnModelConfig, unbound
from parallel3d.run_config import AnyConfig, Config

if TYPE_CHECKING:
    from parallel3d.models.layer_inputs import LayerInputs
    from parallel3d.models.own_loss import Loss
    from parallel3d.models.own_model import Model

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")  # MODULE.CLASS
SCALARS = (int, float, bool, str)
NO_PRESET = "~model"  # the word for Hydra that leaves out the preset of the transformer


@dataclass(frozen=True)
class ModelClass:
    """The class of a user's own model.

    Attributes:
        target: its name, as in `model._target_`.
        cls: the class.
        given: values of fields that a script gives; others have their defaults.
        loss: the loss that a script gives in place of the model's own, or None.
    """

    target: str
    cls: type[Model]
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss: Callable[[Any, LayerInputs], Loss] | None = None

    @property
    def title(self) -> str:
        return self.cls.__name__


# The class


def imported(target: Any) -> ModelClass:
    """Imports the class that a start names. Raises UserError if there is none that can be used.

    As with `python -m`, modules of the current folder are found first.
    """
    typed = f"{TARGET}={show(target)}"
    if not isinstance(target, str) or not NAME.fullmatch(target):
        raise UserError(
            f"{typed} must be the name of a class with its module, such as "
            f"{TARGET}=my_package.my_model.MyModel"
        )
    module_name, _, name = target.rpartition(".")
    here = os.getcwd()
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)
    with _explained(f"{typed}: importing {module_name}", module_name):
        module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, value in vars(module).items() if isinstance(value, type)]
        where = getattr(module, "__file__", None) or module_name
        raise UserError(
            f"{typed}: {where} has no {name}{nearest_hint(name, known, f'{TARGET}={module_name}.')}"
        )
    check_class(found, typed)
    return ModelClass(target, found)


def check_not_imported() -> None:
    """Raises UserError if `imported` is importing the script that calls this function.

    Otherwise the script would train while its class is looked up.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is imported.__code__:
            typed = f"{TARGET}={frame.f_locals['target']}"
            raise UserError(
                f"{typed} imports a script that calls fit: put the call below "
                "if __name__ == '__main__'"
            )
        frame = frame.f_back


def of_script(model: Any, loss: Any = None) -> ModelClass:
    """Returns the class and the fields of what a script gives as `fit(model=…)`. Raises UserError.

    It gives a class, `functools.partial` of one, or an instance, which stands for its class and the
    values of its fields; and perhaps a loss, as `fit(loss=…)`.
    """
    typed = f"fit(model={_brief(model)})"
    given: dict[str, Any] = {}
    cls: Any = model
    if isinstance(model, functools.partial):
        cls = model.func
        check_class(cls, typed)
        try:
            given = dict(
                inspect.signature(cls).bind_partial(*model.args, **model.keywords).arguments
            )
        except TypeError as error:
            raise UserError(
                f"{typed}: {error}; fields of {cls.__name__} are {_listed(cls)}"
            ) from None
    elif not isinstance(model, type):
        cls = type(model)
        check_class(cls, typed)
        for name in _parameters(cls):
            if not hasattr(model, name):
                raise UserError(
                    f"{typed}: a {cls.__name__} has no attribute {name}, where this field's "
                    f"value would be; make {cls.__name__} a dataclass, or give the class itself"
                )
            given[name] = getattr(model, name)
    check_class(cls, typed)
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    name = Path(file).stem if cls.__module__ == "__main__" and file else cls.__module__
    check_loss(loss)
    found = ModelClass(f"{name}.{cls.__qualname__}", cls, loss=loss)
    keys = all_keys(schema_with(Config, found))
    plain = {name: _as_list(value) for name, value in given.items()}
    for name, value in plain.items():
        _check_field(f"model.{name}", value, keys.get(f"model.{name}"), found)
    return dataclasses.replace(found, given=plain)


def check_loss(loss: Any) -> None:
    """Raises UserError unless `loss` is None, or can be called with the outputs and the inputs."""
    if loss is None:
        return
    fits = callable(loss) and not isinstance(loss, type)
    if fits:
        with suppress(ValueError):  # a function of C has no signature
            try:
                inspect.signature(loss).bind(None, None)
            except TypeError:
                fits = False
    if not fits:
        raise UserError(
            f"fit(loss={_brief(loss)}) must be a function of (outputs, inputs) that returns "
            "p3d.Loss(sum, count)"
        )


def check_class(found: Any, typed: str) -> None:
    """Raises UserError unless `found` is a class of `p3d.Model` that is not abstract."""
    from parallel3d.models.own_model import Model  # imported here, because it imports torch

    if not isinstance(found, type) or not issubclass(found, Model) or found is Model:
        kind = (
            f"the class {found.__name__}"
            if isinstance(found, type)
            else f"a {type(found).__name__}"
        )
        raise UserError(
            f"{typed} must be a class of p3d.Model, but is {kind}: write it as "
            "class MyModel(p3d.Model)"
        )


@contextmanager
def _explained(doing: str, module: str = "") -> Iterator[None]:
    """Turns an error of the user's code in the block into a UserError that begins with `doing`.

    A module that is missing is named if it is `module` itself, or a package around it.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"{doing} raises {_said(error)}") from None
        files = [path.stem for path in Path().glob("*.py")]
        folders = [path.parent.name for path in Path().glob("*/__init__.py")]
        hint = nearest_hint(error.name, [*files, *folders])
        raise UserError(
            f"{doing.partition(':')[0]}: there is no module {error.name} in the current folder, on "
            f"PYTHONPATH or among the installed packages{hint}"
        ) from None
    except SystemExit as error:
        raise UserError(
            f"{doing} ends the process (SystemExit: {error}); what starts a program belongs below "
            "if __name__ == '__main__'"
        ) from None
    except BaseException as error:
        raise UserError(f"{doing} raises {_said(error)}") from None


def _said(error: BaseException) -> str:
    """Returns an error's class, message and place in the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{Path(error.filename).name}, line {error.lineno}"
        return f"{type(error).__name__}: {error.msg} ({where})"
    message = first_line(error)
    name = type(error).__name__
    said = name if message == name else f"{name}: {message}"
    frame = users_frame(error)
    return f"{said} ({Path(frame.filename).name}, line {frame.lineno})" if frame else said


# Its fields


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Returns the parameters with which a class is called by name, but not *args and **kwargs."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = inspect.signature(cls).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind in kinds}


def _listed(cls: type) -> str:
    return ", ".join(_parameters(cls)) or "none"


def _defaults(cls: type) -> dict[str, Any]:
    """Returns the default of each field of a class, or REQUIRED."""
    found = {}
    made = {f.name: f.default_factory for f in _dataclass_fields(cls)}
    for name, parameter in _parameters(cls).items():
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        factory = made.get(name, dataclasses.MISSING)
        found[name] = default if factory is dataclasses.MISSING else factory()
    return found


def _dataclass_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def schema_with(schema: type[AnyConfig], own: ModelClass) -> type[AnyConfig]:
    """Returns a schema whose section `model` has the fields of a user's own model as its keys.

    Raises UserError for a field whose type a configuration cannot hold.
    """
    cls = own.cls
    try:
        of_fields = {f.name: dict(f.metadata) for f in _dataclass_fields(cls)}
        hints = typing.get_type_hints(cls.__init__)
        defaults = _defaults(cls)
    except Exception as error:
        raise UserError(
            f"{TARGET}={own.target}: its fields cannot be read: {_said(error)}"
        ) from None
    fields: list[Any] = [("_target_", str, key(own.target, f"the class {own.title} of your own"))]
    tuples = set()
    for name, default in defaults.items():
        where = f"{TARGET}={own.target}: the field {name}"
        hint, choices, is_tuple = _hint(hints.get(name), default, where)
        tuples |= {name} if is_tuple else set()
        value = _as_list(own.given.get(name, default))
        help = of_fields.get(name, {}).get("help", f"field of {own.title}")
        low: dict[str, Any] = (
            {"minimum": 1, "maximum": 4096} if name == "num_layers" and hint is int else {}
        )
        fields.append((name, hint, key(value, help, choices=choices, **low)))
    section = dataclasses.make_dataclass(own.title, fields, namespace={"TUPLES": tuples})
    section.__doc__ = (cls.__doc__ or own.title).strip()
    model = ("model", section, dataclasses.field(default_factory=section))
    made = dataclasses.make_dataclass(
        schema.__name__, [model], bases=(schema,), namespace={"OWN_MODEL": own}
    )
    return cast(type[AnyConfig], made)


def own_model_of(schema: type[Config]) -> ModelClass | None:
    """Returns the class of a user's own model whose fields are in a schema, or None."""
    return getattr(schema, "OWN_MODEL", None)


def _hint(hint: Any, default: Any, where: str) -> tuple[Any, tuple[str, ...] | None, bool]:
    """Returns the type of a key for the type of a field, its choices or None, and if it is a tuple.

    The type of a list stands for a tuple. Raises UserError, which begins with `where`.
    """
    if hint is None and default is not REQUIRED and type(default) in SCALARS:
        hint = type(default)
    arms = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    is_optional = default is None or type(None) in typing.get_args(hint)
    arm = float if {*arms} == {int, float} else arms[0] if len(arms) == 1 else None
    kind, choices = None, None
    if arm in SCALARS:
        kind = arm
    elif typing.get_origin(arm) is typing.Literal:
        words = [word for word in typing.get_args(arm) if word is not None]
        is_optional |= len(words) < len(typing.get_args(arm))
        if all(isinstance(word, str) for word in words):
            kind, choices = str, tuple(words)
    elif typing.get_origin(arm) in (list, tuple):
        items = {item for item in typing.get_args(arm) if item is not Ellipsis}
        if len(items) == 1 and items <= {*SCALARS}:
            kind = list[items.pop()]  # type: ignore[misc]
    if kind is None:
        shown = "no type" if hint is None else f"the type {getattr(hint, '__name__', hint)}"
        raise UserError(
            f"{where} has {shown}, but a configuration holds int, float, bool, str, None, and list "
            "or tuple of these; give it one of these types"
        )
    is_tuple = typing.get_origin(arm) is tuple
    return (kind | None if is_optional else kind), choices, is_tuple


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_field(name: str, value: Any, found: Any, own: ModelClass) -> None:
    """Raises UserError for a field that the class does not have, or whose type is wrong."""
    if found is None:
        leaf = name.removeprefix("model.")
        raise UserError(
            f"{name}={show(value)}: {own.title} has no field {leaf}; it has {_listed(own.cls)}"
            f"{nearest_hint(leaf, _parameters(own.cls), 'model.')}"
        )
    check_value(name, value, schema_with(Config, dataclasses.replace(own, given={})))


def _brief(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


# The words of a start


def schema_of(
    schema: type[AnyConfig], words: Sequence[str], own: Path | None, script: ModelClass | None
) -> tuple[type[AnyConfig], list[str]]:
    """Returns the schema for the words of a start, and words to add to them for Hydra.

    The schema has the fields of the class that the words name; without one it is `schema` itself.
    Raises UserError for a class that cannot be used, and for a field that it does not have.

    Args:
        schema: the schema of the subcommand.
        words: the overrides of the command line.
        own: the folder of --config-dir, or None.
        script: what a script gives as `fit(model=…)`, or None.
    """
    named = _named(words, own)
    if script is not None and named.target not in (None, script.target):
        raise UserError(
            f"{TARGET}={show(named.target)} has no effect beside the model that the script gives "
            "fit(model=…); leave it out"
        )
    if script is None and named.target is None:
        return schema, []
    found = script or imported(named.target)
    if named.preset is not None and not named.is_own_preset:
        raise UserError(
            f"{named.word} chooses a preset of the transformer, which has no effect on "
            f"{found.title}, a model of your own; leave it out, or put a file with fields of "
            f"{found.title} into the folder model of --config-dir"
        )
    schema = schema_with(schema, found)
    for word in words:
        for name in keys_of(word):
            if name.startswith("model.") and name not in all_keys(schema):
                _check_field(name, word.partition("=")[2], None, found)
    return schema, [] if named.is_own_preset else [NO_PRESET]


def keys_given(words: Sequence[str], own: Path | None, script: ModelClass | None) -> set[str]:
    """Returns the keys of a user's own model that a preset of theirs or a script gives."""
    given = () if script is None else script.given
    return {*_named(words, own).keys, *(f"model.{name}" for name in given)}


class _Named(typing.NamedTuple):
    """What the words of a start and the files that they choose say about the model.

    Attributes:
        target: the class, or None.
        preset: the preset of the model, or None if only the default one is chosen.
        is_own_preset: whether the preset is a file of --config-dir.
        word: what chooses the preset.
        keys: the keys of the model that the preset's own file sets.
    """

    target: Any
    preset: str | None
    is_own_preset: bool
    word: str
    keys: frozenset[str]


def _named(words: Sequence[str], own: Path | None) -> _Named:
    """Finds the class that words and files of --config-dir name, as Hydra's order of them has it.

    The command line counts before an experiment, and an experiment before a preset.
    """
    typed = {word.partition("=")[0].lstrip("+~"): word for word in words if keys_of(word)}
    target: Any = option(typed[TARGET]) if TARGET in typed else None
    preset, word = (option(typed["model"]), typed["model"]) if "model" in typed else (None, "")
    experiment = option(typed["experiment"]) if "experiment" in typed else None
    for file in experiment_files(experiment, own) if experiment else ():
        if target is None:
            target = OmegaConf.select(file, TARGET)
        for entry in file.get("defaults", ()):
            if preset is None and isinstance(entry, DictConfig):
                for group, name in entry.items():  # such as override /model: my_preset
                    if str(group).split()[-1].lstrip("/") == "model":
                        preset, word = str(name), typed["experiment"]
    files = own_presets(preset, own)
    for preset_file in files:
        target = preset_file.get("_target_") if target is None else target
    keys = frozenset(f"model.{name}" for file in files for name in file)
    return _Named(target, preset, bool(files), word, keys)


# The model of a run


def of_schema(config: Config) -> Config:
    """Converts a configuration of a schema with own fields to the schema without them.

    Its model is an `OwnModelConfig` without the fields that must be given, but are not. Other
    configurations are returned as they are.
    """
    own = own_model_of(type(config))
    if own is None:
        return config
    base: type[Config] = type(config).__bases__[0]
    fields = {
        f.name: value
        for f in dataclasses.fields(config.model)
        if (value := getattr(config.model, f.name)) != REQUIRED and f.name != "_target_"
    }
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(base)}
    return base(**values | {"model": unbound(own.target, fields)})


def check_takes_text(config: Config) -> None:
    """Raises UserError for a user's own model that does not say what text it takes."""
    if not isinstance(config.model, OwnModelConfig):
        return
    lacks = [n for n in ("seq_length", "vocab_size") if not hasattr(config.model.instance, n)]
    if lacks:
        raise UserError(
            f"data={config.data.name} is text, but {TARGET}={config.model._target_} has no field "
            f"{' and no '.join(lacks)}; add it, or give samples of your own to fit(train=…)"
        )


def completed(config: AnyConfig, schema: type[Config]) -> AnyConfig:
    """Returns the configuration with the user's own model, which is made from its fields.

    Other configurations are returned as they are. Raises UserError for a field that is missing,
    unknown or of a wrong type, and for a model that cannot be made from its fields.
    """
    own = own_model_of(schema)
    if own is None:
        return config
    assert isinstance(config.model, OwnModelConfig)  # as `of_schema` has made it
    fields, keys = dict(config.model.fields), all_keys(schema)
    for name, value in fields.items():
        _check_field(f"model.{name}", value, keys.get(f"model.{name}"), own)
    left = [keys[f"model.{name}"] for name in _parameters(own.cls) if name not in fields]
    if left:
        names = " and ".join(each.name for each in left)
        given = ", ".join(f"{each.name}=… ({allowed(each)})" for each in left)
        raise UserError(f"{TARGET}={own.target} leaves {names} to you: give {given}")
    # imported here, because it imports torch
    from parallel3d.models.own_model import Model, own_config

    typed = f"{TARGET}={own.target}"
    tuples = sections_of(schema)["model"].TUPLES  # type: ignore[attr-defined]
    values = {n: tuple(v) if n in tuples and v is not None else v for n, v in fields.items()}
    shown = ", ".join(f"model.{name}={show(value)}" for name, value in fields.items())
    with _explained(f"{typed}: {own.title} with {shown or 'no fields'}"):
        instance = own.cls(**values)
    with _explained(f"{typed}: building the parts of {own.title}"):
        model = own_config(config.model, instance, own.loss)
    if own.cls.loss is Model.loss and own.loss is None:
        raise UserError(
            f"{TARGET}={own.target} has no loss: write loss(self, outputs, inputs), which returns "
            "p3d.Loss(sum, count), or give a function of both to fit(loss=…)"
        )
    return dataclasses.replace(config, model=model)
