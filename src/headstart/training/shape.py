"""The shape of a draft for a target: from settings and the target's own. No torch."""

from __future__ import annotations

from headstart import config
from headstart.drafts.shape import DraftShape, LatentShape
from headstart.errors import UserError
from headstart.target.anatomy import Anatomy

HEAD_DIM = 128  # of a draft for a target whose own head geometry is of another kind (MLA)


def shape_for(settings: config.Draft, target: Anatomy, aux: tuple[int, ...], vocab: int) -> DraftShape:
    """The draft's shape: what the settings say, else the target's own (the head dimensions of MLA for a draft with MLA alone).

    aux: boundary indices. vocab: size of the draft vocabulary.

    Raises:
        UserError: heads that do not divide, MLA that the target has not, or a part of the target's shape that is unknown
            and not set.
    """
    width = target.required("hidden_size")
    latent = latent_of(target) if settings.attention == "mla" else None
    heads, kv_heads, head_dim = _latent_heads(settings, target, latent) if latent else _heads(settings, target, width)
    if settings.sliding_window:
        _check_window(settings.sliding_window, target)
        _check_pages(target, kv_heads * head_dim)
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"draft.num_heads = {heads}, num_kv_heads = {kv_heads}, head_dim = {head_dim} do not fit",
            looked_for="num_heads a multiple of num_kv_heads, head_dim even",
        )
    return DraftShape(
        hidden_size=width,
        target_hidden_size=width,
        aux_layers=aux,
        num_layers=settings.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or target.required("intermediate_size"),
        target_vocab_size=target.required("vocab_size"),
        draft_vocab_size=vocab,
        rms_norm_eps=target.rms_norm_eps or 1e-5,
        rope_theta=target.rope_theta or 10000.0,
        max_positions=target.required("max_positions"),
        norm_before_residual=settings.norm_before_residual,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        latent=latent,
        sliding_window=settings.sliding_window or (None if latent else _inherited(target, settings.ttt_steps)),
    )


def _inherited(target: Anatomy, steps: int) -> int | None:
    """A window that all of the target's layers have: vLLM gives it to a draft that names none (attention.py of 0.32: without one of
    its own, a layer takes the cache's)."""
    window = target.sliding_window
    if window and window < steps:
        raise UserError(
            f"the target's sliding window of {window} tokens is below draft.ttt_steps = {steps}",
            do=f"set draft.ttt_steps to {window} or less",
        )
    return window if window and window < target.required("max_positions") else None


def _check_window(window: int, target: Anatomy) -> None:
    if window > target.required("max_positions"):
        raise UserError(
            f"draft.sliding_window = {window} is more than the target reads",
            looked_for=f"at most {target.required('max_positions')}",
            do="leave draft.sliding_window out",
        )


def _check_pages(target: Anatomy, width: int) -> None:
    """A windowed draft is another kind of cache in vLLM. Before 0.25 such kinds must have pages of one size, which follows from the
    width of the keys; beside MLA none fits (kv_cache_utils.py of 0.11 to 0.32)."""
    own = None if target.mla else (target.num_kv_heads or 0) * (target.head_dim or 0)
    if own in (0, width):
        return
    raise UserError(
        f"draft.sliding_window is set, and the draft's keys are {width} wide, the target's "
        + ("latent (MLA)" if own is None else str(own)),
        looked_for="the same width (num_kv_heads x head_dim): vLLM keeps both in pages of one size",
        do="leave draft.sliding_window out" if own is None else "leave draft.num_kv_heads and draft.head_dim out",
    )


def latent_of(target: Anatomy) -> LatentShape:
    """The target's sizes of MLA. Raises UserError when it has none, or such that no draft can have."""
    if not target.mla:
        raise UserError(
            "draft.attention = 'mla', but the target has no multi-head latent attention: "
            + target.evidence.get("mla", "unknown"),
            looked_for="kv_lora_rank in its config.json",
            do="leave draft.attention out",
        )
    if target.latent_sizes is None:
        raise UserError(
            f"draft.attention = 'mla', but of the target's MLA a size is {target.evidence.get('latent_sizes', 'unknown')}",
            looked_for="q_lora_rank (vLLM 0.32 loads no such draft without it), kv_lora_rank, and the widths of its heads",
            do="leave draft.attention out",
        )
    sizes = LatentShape(**target.latent_sizes)
    if sizes.rope % 2 or sizes.value > sizes.nope + sizes.rope:
        raise UserError(
            f"the target's MLA has qk_nope_head_dim {sizes.nope}, qk_rope_head_dim {sizes.rope}, v_head_dim {sizes.value}",
            looked_for="an even rope part, and values no wider than keys",
            do="leave draft.attention out",
        )
    return sizes


def _latent_heads(settings: config.Draft, target: Anatomy, sizes: LatentShape) -> tuple[int, int, int]:
    heads = settings.num_heads or target.required("num_heads")
    return heads, heads, sizes.nope + sizes.rope


def _heads(settings: config.Draft, target: Anatomy, width: int) -> tuple[int, int, int]:
    if target.mla:
        count = max(width // HEAD_DIM, 1)
        return (
            settings.num_heads or count,
            settings.num_kv_heads or settings.num_heads or count,
            settings.head_dim or HEAD_DIM,
        )
    heads = settings.num_heads or target.required("num_heads")
    kv_heads = settings.num_kv_heads or (heads if settings.num_heads else target.num_kv_heads or heads)
    return heads, kv_heads, settings.head_dim or target.head_dim or width // heads
