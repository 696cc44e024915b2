"""A foreign draft's `config.json` as the shape of a draft: each field of its kind, and none that changes the numbers unseen.

What a field does was read in Transformers 5.19 (`modeling_rope_utils.py`, the models llama, deepseek_v2 and deepseek_v3) and in
vLLM 0.18 to 0.32 (`llama_eagle3.py`, `deepseek_eagle3.py`, `rotary_embedding/`). A value under which it does nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headstart.drafts.shape import DraftShape, LatentShape
from headstart.errors import UserError
from headstart.formats.common import CONFIG, KV_RANK, LAYER_IDS, LAYER_TYPES, SLIDING, window_fault
from headstart.formats.fields import Fields
from headstart.target.spellings import LATENT

_LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_THETA = 10000.0  # what engines take when none is given
_MOST_IDS, _LONGEST = 2**24, 2**31 - 1  # of a vocabulary, of a text

_OFF = ("attention_bias", "bias", "qkv_bias", "mlp_bias")
_ONE = ("partial_rotary_factor", "logit_scale")
_ABSENT = ("index_topk", "llama_4_scaling", "dual_chunk_attention_config", "quantization_config")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_DENSE_LAYERS = {"deepseek_v3": 3}  # first_k_dense_replace where none is given, else 0

_ROPES = ("rope_parameters", "rope_scaling")
_STRETCHED = ("linear", "llama3", "yarn")  # plain when the factor is 1; `dynamic` is not, past max_position_embeddings
_ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor", "attn_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "apply_yarn_scaling"),
    "mrope_section",  # of text, all sections have the same positions
)


def shape_of(config: Mapping[str, Any], where: Path) -> DraftShape:
    """The shape that a flat config describes; what may be absent gets the value that the engine gives it.

    Raises:
        UserError: a field is of the wrong kind or missing, or the draft does what ours do not.
    """
    fields = Fields(config, where / CONFIG)
    latent = _latent(fields)
    _refuse_strange(fields, mla=latent is not None)
    hidden, vocabulary = fields.size("hidden_size"), fields.size("vocab_size", most=_MOST_IDS)
    heads, kv_heads, head_dim = _heads(fields, latent)
    return DraftShape(
        hidden_size=hidden,
        target_hidden_size=fields.size("target_hidden_size", hidden),
        aux_layers=_layer_ids(fields),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        target_vocab_size=vocabulary,
        draft_vocab_size=fields.size("draft_vocab_size", vocabulary, most=vocabulary),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_theta(fields),
        max_positions=fields.size("max_position_embeddings", most=_LONGEST),
        norm_before_residual=fields.switch("norm_before_residual"),
        fc_norm=fields.switch("fc_norm"),
        norm_output=fields.switch("norm_output"),
        latent=latent,
        sliding_window=_window(fields),
    )


def _heads(fields: Fields, latent: LatentShape | None) -> tuple[int, int, int]:
    """Query heads, key heads, and their width. With MLA engines look at no other field."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if latent:
        return heads, heads, latent.nope + latent.rope
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if fields.raw.get("head_dim") is None and hidden % heads:
        fields.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}, since there is no head_dim")
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise UserError(f"{fields.file} gives heads a width of {head_dim}", looked_for="an even head_dim")
    return heads, kv_heads, head_dim


def _window(fields: Fields) -> int | None:
    if fault := window_fault(fields.raw):
        raise UserError(
            f"the draft in {fields.file.parent} cannot be read: {fault}",
            looked_for="a plain Llama layer, or one with a window",
        )
    return fields.raw["sliding_window"] if SLIDING in (fields.raw.get(LAYER_TYPES) or ()) else None


def _latent(fields: Fields) -> LatentShape | None:
    kind = fields.raw.get("model_type")
    if fields.raw.get(KV_RANK) is None:
        if kind in _LATENT_TYPES:
            fields.wrong(KV_RANK, f"a whole number, since model_type is {kind}")
        return None
    sizes = {name: fields.size(foreign) for name, foreign in LATENT.items()}
    where = fields.file.parent
    if _window(fields) is not None:
        raise UserError(f"the draft in {where} has MLA and a sliding window, which vLLM does not serve, nor headstart")
    if sizes["value"] > sizes["nope"] + sizes["rope"]:
        raise UserError(f"the draft in {where} has values wider than its keys, which headstart has no draft for")
    if sizes["rope"] % 2:
        fields.wrong(LATENT["rope"], "an even width")
    return LatentShape(**sizes)


def _refuse_strange(fields: Fields, *, mla: bool) -> None:
    """Settings that change what the draft computes, in ways that `Eagle3` has no switch for."""
    eagle = fields.part("eagle_config")
    if fields.get("model_type", "llama") not in (_LATENT_TYPES if mla else ("llama",)):
        fields.strange("model_type")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.strange("hidden_act")
    before_fc = eagle if eagle.raw.get("norm_before_fc") is not None else fields
    for place, name in [(before_fc, "norm_before_fc"), *((fields, name) for name in _OFF)]:
        if place.switch(name):
            place.strange(name)
    for name in _ABSENT:
        if fields.raw.get(name):
            fields.strange(name)
    for place, name in ((fields, "is_causal"), (eagle, "use_aux_hidden_state")):
        if place.get(name, True) is not True:
            place.strange(name)
    _refuse_factors(fields, _ONE)
    if mla:
        _refuse_strange_latent(fields)


def _refuse_strange_latent(fields: Fields) -> None:
    """Our rotary positions turn neighbours (`layers.rotate_pairs`), and our layers have one dense MLP."""
    if fields.get("rope_interleave", True) is not True:
        fields.strange("rope_interleave", "true, or nothing: positions that turn neighbours together")
    experts = next((name for name in _EXPERTS if fields.raw.get(name)), None)
    if experts is None:
        return
    dense = fields.raw.get("first_k_dense_replace")
    if dense is None:
        dense = _DENSE_LAYERS.get(fields.get("model_type", ""), 0)
    if isinstance(dense, bool) or not isinstance(dense, int):
        fields.wrong("first_k_dense_replace", "a whole number")
    if dense < fields.size("num_hidden_layers"):
        fields.strange(experts, "dense MLPs: no experts, or first_k_dense_replace at least num_hidden_layers")


def _refuse_factors(fields: Fields, names: tuple[str, ...]) -> None:
    for name in names:
        if fields.number(name, 1.0, least=0) != 1:
            fields.strange(name, "1, or nothing")


def _theta(fields: Fields) -> float:
    """The base of plain rotary positions.

    Transformers 5 reads `rope_scaling` before `rope_parameters` and both before a `rope_theta` beside them, others in another
    order: so every place that is there must tell the same.
    """
    places = [place for name in _ROPES if (place := fields.part(name)).raw]
    for place in places:
        _refuse_stretched(place, fields)
    beside = fields.number("rope_theta", 0.0)
    found = {place.number("rope_theta", beside or _THETA) for place in places} | ({beside} if beside else set())
    if len(found) > 1:
        raise UserError(
            f"{fields.file} gives rotary positions several bases: {', '.join(map(str, sorted(found)))}",
            looked_for=f"one rope_theta, the same in {' and '.join(_ROPES)} and beside them ({_THETA:.0f} where it is missing)",
        )
    return found.pop() if found else _THETA


def _refuse_stretched(place: Fields, fields: Fields) -> None:
    """Rotary positions that are not the plain ones. With a factor of 1, mscale and the borders of yarn and llama3 do nothing."""
    unknown = [name for name, value in place.raw.items() if value is not None and name not in _ROPE_KEYS]
    if unknown:
        place.strange(unknown[0], "plain rotary positions")
    _refuse_factors(place, ("partial_rotary_factor",))
    names = [name for name in ("rope_type", "type") if place.raw.get(name) is not None]
    for name in names:
        if place.raw[name] not in ("default", *_STRETCHED):
            place.strange(name, f"default, or {', '.join(_STRETCHED)} with a factor of 1")
    if len({place.raw[name] for name in names}) > 1:
        place.wrong("type", f"the same as rope_type = {place.raw['rope_type']!r}")
    kind = place.raw[names[0]] if names else "default"
    if kind == "default":
        return
    if place.number("factor", 0.0, least=0) != 1:
        place.strange("factor", f"1: {kind} that stretches nothing")
    if kind == "yarn":
        _refuse_loud(place, fields)


def _refuse_loud(place: Fields, fields: Fields) -> None:
    """What is left of yarn with a factor of 1: a scale of its own, and a length whose ratio Transformers 4 takes for the factor."""
    _refuse_factors(place, ("attention_factor", "attn_factor"))
    for name in ("mscale", "mscale_all_dim"):
        place.number(name, 1.0, least=0)
    longest = fields.size("max_position_embeddings", most=_LONGEST)
    if place.size("original_max_position_embeddings", longest, most=_LONGEST) != longest:
        place.strange("original_max_position_embeddings", f"max_position_embeddings = {longest}, or nothing")


def _layer_ids(fields: Fields) -> tuple[int, ...]:
    """Boundary indices, wherever they stand."""
    found: list[list[int]] = []
    for place, name in _places_of_ids(fields):
        ids: Any = place.raw.get(name)
        whole = isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
        if not whole or ids != sorted(set(ids)) or ids[0] < 0:
            place.wrong(name, "whole numbers from 0 up, each once, rising: engines give the states in that order")
        found.append(ids)
    if not found:
        raise UserError(
            f"{fields.file} does not say which states of the target the draft reads",
            looked_for=LAYER_IDS,
            do="add the ids it was trained with; engines would take 2, n//2, n-3",
        )
    if any(ids != found[0] for ids in found):
        told = " and ".join(map(str, found))
        raise UserError(f"{fields.file} names other states of the target in other places: {told}", looked_for=LAYER_IDS)
    return tuple(found[0])


def _places_of_ids(fields: Fields) -> Iterator[tuple[Fields, str]]:
    eagle = fields.part("eagle_config")
    for place, name in ((fields, LAYER_IDS), (eagle, LAYER_IDS), (eagle, "layer_ids")):
        if place.raw.get(name) not in (None, []):
            yield place, name
