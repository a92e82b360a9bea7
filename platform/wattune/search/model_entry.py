"""`model` of a search space: a catalog's model, one that is like it, one of a `config.json`, or one of its own."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path as FilePath
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, PrivateAttr

from wattune.catalog.huggingface import read_config
from wattune.catalog.models import BIASED, LAYER_KINDS, MODELS, ModelSpec, model
from wattune.errors import PlanError
from wattune.field_types import Positive
from wattune.scale_down.cut import ALLOWED_PERCENT, Target, parse_target
from wattune.search.declared import keys_of
from wattune.search.fields import Entry, folder_of, named_by
from wattune.search.problems import Path

OWN_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
"""Names that models and devices of a space's own may have: they become columns, tags and labels."""

_REQUIRED: Final = tuple(each.name for each in fields(ModelSpec) if each.default is MISSING and each.name != "name")
"""Fields without which a model is not described."""

_EXAMPLE: Final = "llama3_70b"


def check_own_name(text: str) -> str:
    """Returns a name that a model or device of a space's own may have. Raises `PlanError` where it may not."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        plain = re.sub(r"[^a-z0-9]", "", text.partition("/")[2].lower())
        short = {re.sub(r"[^a-z0-9]", "", name.removesuffix("_like")): name for name in MODELS}
        near = difflib.get_close_matches(plain, short, n=1, cutoff=0.6)
        meant = f'did you mean "{short[near[0]]}"? ' if near else ""
        raise PlanError(
            f'"{text[:60]}" is a name on a hub, and nothing is downloaded; {meant}Give a catalog name, or a name of '
            "your own with from_config: config.json"
        )
    if not re.fullmatch(OWN_NAME, text):
        raise PlanError(
            f'"{text[:60]}" is no name; allowed: 1 to 80 letters, digits, ".", "_" and "-", beginning with a letter or '
            "digit"
        )
    return text


def own_name_of(config: FilePath) -> str:
    """Returns a name for the model of a `config.json`, which no catalog model has: its folder's, or a file's own one.

    Raises `PlanError` where that makes no name.
    """
    place = config.resolve()
    text = place.parent.name if place.name == "config.json" else place.stem
    own = check_own_name(re.sub(r"[^A-Za-z0-9._-]+", "_", text) or "own_model")
    return f"{own}_own" if own in MODELS else own


def model_in_short(text: Any, leave_out: Sequence[str] = ()) -> Any:
    """Returns the entry of a model that is named, or the path of a `config.json`; what is no text stays.

    Raises `PlanError` where the path makes no name.
    """
    if not isinstance(text, str | FilePath) or (isinstance(text, str) and not text.endswith(".json")):
        return {"name": text, "leave_out": [*leave_out]} if leave_out else text
    return {"name": own_name_of(FilePath(text)), "from_config": str(text), "leave_out": [*leave_out]}


@keys_of(ModelSpec, optional=[each.name for each in fields(ModelSpec)])
class ModelEntry(Entry):
    """A decoder transformer: a model of the catalog, whose fields may be overridden, or one of your own."""

    decisive: ClassVar = frozenset({"name", "like", "from_config"})

    name: Annotated[
        str, named_by(check_own_name, names=tuple(MODELS), pattern=f"^{OWN_NAME}$", examples=[_EXAMPLE, "my_model"])
    ]
    """Catalog name (`wattune catalog`). Another name is your own model's: add `like`, `from_config`, or every field."""
    like: Annotated[str, named_by(model, names=tuple(MODELS))] | None = None
    """Catalog model that your own one takes every field from that is not given."""
    from_config: Annotated[str, Field(min_length=1, examples=["config.json"])] | None = None
    """Path of a Hugging Face `config.json` that describes your own model; relative to the space. It is read offline."""
    leave_out: Annotated[list[str], Field(examples=[["qkv_bias"]])] = Field(default=[])
    """Features of the `config.json` to train without, by the names that wattune gives them where it refuses them."""
    scale_to: (
        Annotated[
            str,
            named_by(parse_target, pattern=r"^\s*[0-9]+x[0-9]+(\s*[\s:]\s*\S+)?\s*$", examples=["1x2 h100_sxm"]),
        ]
        | None
    ) = None
    """Cluster `NODESxDEVICES device` to run on: a small run of each plan stands for that on `cluster`."""
    allow_percent: Annotated[Positive, Field(examples=[ALLOWED_PERCENT])] | None = None
    """With `scale_to`: largest distance of a small run, in percent of a step. Left out: 5."""

    _spec: ModelSpec = PrivateAttr()

    def problems_as_a_whole(self, context: Any) -> list[tuple[Path, str]]:
        """Finds problems of keys that are valid one by one."""
        base = self._base(context)
        if not isinstance(base, ModelSpec):
            return base
        given = self._overrides()
        spec = replace(base, **given)
        found = _model_problems(spec)
        if self.allow_percent is not None and self.scale_to is None:
            found.append((("allow_percent",), "is of scale_to; add it, or leave this out"))
        self._spec = spec
        return found

    def resolve(self) -> ModelSpec:
        """The model it describes, overridden."""
        return self._spec

    @property
    def target(self) -> Target | None:
        """The cluster that small runs are on; None where it is not scaled down."""
        return None if self.scale_to is None else parse_target(self.scale_to, self.allow_percent or ALLOWED_PERCENT)

    def _overrides(self) -> dict[str, Any]:
        origins = {"name", "like", "from_config", "leave_out", "scale_to", "allow_percent"}
        return self.model_dump(exclude_none=True, exclude=origins)

    def _base(self, context: Any) -> ModelSpec | list[tuple[Path, str]]:
        """Returns the model before overrides: the catalog's, one it is like, or the one of a file; else problems."""
        origins = [key for key in ("like", "from_config") if getattr(self, key) is not None]
        found: list[tuple[Path, str]] = []
        if origins and self.name in MODELS:
            found.append((("name",), f"{self.name} is a catalog model; give yours a name of its own"))
        if len(origins) > 1:
            found.append((("from_config",), "and like both describe the model; keep one"))
        if self.leave_out and self.from_config is None:
            found.append((("leave_out",), "names features of a config.json; give from_config, or leave it out"))
        if found:
            return found
        if self.like is not None:
            return replace(model(self.like), name=self.name, source=f"like {self.like}")
        if self.from_config is not None:
            try:
                path = folder_of(context) / self.from_config
                return read_config(path, self.name, self.leave_out)
            except PlanError as error:
                return [(("from_config",), line) for line in str(error).split("\n")]
        if self.name in MODELS:
            return model(self.name)
        return self._own()

    def _own(self) -> ModelSpec | list[tuple[Path, str]]:
        """Returns a model that is described by its fields alone, else what it lacks."""
        given = self._overrides()
        missing = [name for name in _REQUIRED if name not in given]
        if missing:
            try:
                model(self.name)
            except PlanError as error:
                fields_too = f", or {', '.join(missing)}" if len(missing) < len(_REQUIRED) else ""
                text = f"{error}; for a model of your own add like: {_EXAMPLE}, from_config: config.json{fields_too}"
                return [(("name",), text)]
        return ModelSpec(name=self.name, source="the space", **{name: given[name] for name in _REQUIRED})


def _model_problems(spec: ModelSpec) -> list[tuple[Path, str]]:
    """Says why a model of these fields cannot exist, field by field."""
    found: list[tuple[Path, str]] = []

    def wrong(when: bool, key: str, text: str) -> None:
        if when:
            found.append(((key,), text))

    heads, kv_heads, experts, chosen = spec.num_heads, spec.num_kv_heads, spec.num_experts, spec.num_experts_per_token
    turned, letters = spec.rope_head_dim or spec.head_size, set(spec.layer_kinds)
    attends = not letters or bool(letters & set("FSDf"))
    if attends and not spec.head_dim and spec.hidden_size % heads:
        text = f"{heads} does not divide hidden_size={spec.hidden_size}; use a divisor"
        found.append((("num_heads",), text))
    elif attends and spec.positions == "rope" and turned % 2:
        key = "rope_head_dim" if spec.rope_head_dim else "head_dim" if spec.head_dim else "num_heads"
        given = f"{getattr(spec, key)} makes head_size={turned}"
        found.append(((key,), f"{given}; rotary positions need an even one"))
    wrong(heads % kv_heads > 0, "num_kv_heads", f"{kv_heads} does not divide num_heads={heads}; use a divisor")
    if bool(chosen) != spec.is_moe or chosen > experts:
        allowed = f"1 to num_experts={experts}" if spec.is_moe else "0, as num_experts=0"
        found.append((("num_experts_per_token",), f"got {chosen}, allowed: {allowed}"))
    for key in ("expert_capacity_factor", "num_dense_layers", "dense_ffn_hidden_size", "shared_ffn_hidden_size"):
        wrong(bool(getattr(spec, key)) and not spec.is_moe, key, f"{spec.name} has num_experts=0; leave it out")
    if (spec.positions == "learned") != (spec.max_positions > 0):
        allowed = "at least 1, as positions=learned" if spec.positions == "learned" else "0, as positions=rope"
        found.append((("max_positions",), f"got {spec.max_positions}, allowed: {allowed}"))
    wrong(
        not set(spec.biased_parts.split()) <= set(BIASED),
        "biased_parts",
        f'got "{spec.biased_parts[:60]}", allowed: words of {" ".join(BIASED)}',
    )
    unknown = sorted(letters - set(LAYER_KINDS))
    meanings = ", ".join(f"{letter} ({meaning})" for letter, meaning in LAYER_KINDS.items())
    wrong(bool(unknown), "layer_kinds", f"got {' '.join(unknown)[:40]}, allowed: letters of {meanings}")
    wrong(len(spec.layer_kinds) > LARGEST_PATTERN, "layer_kinds", f"allowed: up to {LARGEST_PATTERN} letters")
    allowed = "1 or more, as layer_kinds has S" if "S" in letters else "0, as layer_kinds has no S"
    contradicts = bool(letters) and ("S" in letters) != bool(spec.sliding_window)
    wrong(contradicts, "sliding_window", f"got {spec.sliding_window}, allowed: {allowed}")
    wrong(
        spec.shared_expert_gate and not spec.shared_ffn_hidden_size,
        "shared_expert_gate",
        "weighs shared experts; give shared_ffn_hidden_size too, or leave it out",
    )
    wrong(
        bool(letters & set("De")) and not spec.is_moe, "num_experts", "got 0, and layer_kinds has layers of a mixture"
    )
    wrong(spec.num_dense_layers > spec.num_layers, "num_dense_layers", f"allowed: up to num_layers={spec.num_layers}")
    wrong(
        bool(spec.num_dense_layers) and bool(letters), "num_dense_layers", "layer_kinds names each kind; leave one out"
    )
    wrong(
        bool(spec.rope_head_dim) != spec.is_latent or (spec.rope_head_dim >= max(spec.head_size, 1) and spec.is_latent),
        "rope_head_dim",
        f"got {spec.rope_head_dim}, allowed: below head_dim in latent attention (kv_lora_rank), else 0",
    )
    wrong(bool(spec.q_lora_rank) and not spec.is_latent, "q_lora_rank", "is of latent attention; give kv_lora_rank too")
    for key in ("ssm_num_heads", "ssm_head_dim", "ssm_state_size", "ssm_num_groups", "ssm_conv_size"):
        has = bool(letters & set("Mm"))
        wrong(
            bool(getattr(spec, key)) != has, key, "must be given with layers M or m of layer_kinds, and with them alone"
        )
    return found


LARGEST_PATTERN: Final = 512
"""Most letters of a pattern of layers."""

NAMES: Final = {"examples": [_EXAMPLE], "anyOf": [{"enum": sorted(MODELS)}]}
"""Description of a model that is a catalog's name alone."""

_SHAPES: Final = ("hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "num_experts", "num_experts_per_token")
"""Fields that a model of fewer layers keeps."""


def other_than_named(spec: ModelSpec) -> str:
    """Says why a model that has a catalog name is another model; empty where it is not, or is a toy of fewer layers.

    A layer that is larger than the catalog's, or another one in all layers, is taken for the model itself.
    """
    known = MODELS.get(spec.name)
    found = {name: getattr(spec, name) for name in _SHAPES if known and getattr(spec, name) != getattr(known, name)}
    if known is None or not found:
        return ""
    if spec.num_layers != known.num_layers and all(value <= getattr(known, name) for name, value in found.items()):
        return ""
    same = [one.name for one in MODELS.values() if all(getattr(one, name) == getattr(spec, name) for name in _SHAPES)]
    differs = ", ".join(f"{name}={value}" for name, value in found.items())
    catalog = ", ".join(str(getattr(known, name)) for name in found)
    twin = f"; its numbers are those of {same[0]}" if same else ""
    return (
        f"{spec.name} with {differs} is another model (catalog: {catalog}), of {spec.num_parameters / 1e9:.1f} and not "
        f"{known.num_parameters / 1e9:.1f} billion parameters{twin}; give it a name of its own with like: {spec.name}, "
        "or leave the override out"
    )
