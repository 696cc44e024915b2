"""Finding the decoder of vLLM models and reading its layers, on small torch modules built as vLLM's are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.engines.vllm import plugin, shims, tapped, taps
from headstart.engines.vllm.drafting import make_draftable
from headstart.engines.vllm.taps import Probe, Taps
from headstart.engines.vllm.tree import LAYER_PATHS, TextModel, find_text_model
from headstart.errors import GateError, UserError

WIDTH, LAYERS, TOKENS = 8, 4, 5


class VocabParallelEmbedding(nn.Embedding):
    """Named as vLLM's, by which it is found."""


class ParallelLMHead(VocabParallelEmbedding):
    pass


class LogitsProcessor(nn.Module):
    pass


class PPMissingLayer(nn.Identity):
    pass


class Norm(nn.Module):
    """vLLM's RMSNorm: with a residual it adds in place, into both arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        residual += x
        x.copy_(self.forward(residual.clone()))
        return x, residual


class Layer(nn.Module):
    """A decoder layer that returns (h, residual), the residual still to be added."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = Norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states.clone()
            return self.mlp(self.input_layernorm(hidden_states)), residual
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class StablelmDecoderLayer(Layer):
    """Named as one of the table: returns a residual that h holds already."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        h, r = super().forward(positions, hidden_states, None)
        return h + r, r


class UnknownTrapLayer(StablelmDecoderLayer):
    """The same, and in no table."""


class SingleLayer(Layer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        h, r = super().forward(positions, hidden_states, None)
        return h + r


class ManyLayer(Layer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        return (*super().forward(positions, hidden_states, residual), "more")


class HalvingLayer(Layer):
    """Neither reading fits: a third of the stream is kept elsewhere."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        h, r = super().forward(positions, hidden_states, residual)
        return h * 3, r * 0.2


class Decoder(nn.Module):
    """The inner model. `loops`: how often the stack is passed."""

    def __init__(self, layer: type[Layer] = Layer, loops: int = 1) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(20, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm, self.loops = Norm(), loops

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        hidden, residual = self.embed_tokens(ids), None
        for _ in range(self.loops):
            for layer in self.layers:
                output = layer(positions, hidden_states=hidden, residual=residual)
                hidden, residual = (output, None) if isinstance(output, Tensor) else output[:2]
        if type(self.layers[0]) in (StablelmDecoderLayer, UnknownTrapLayer):
            residual = None
        normed = self.norm(hidden) if residual is None else self.norm(hidden, residual)
        return normed if isinstance(normed, Tensor) else normed[0]


class Causal(nn.Module):
    """The outer model."""

    def __init__(self, layer: type[Layer] = Layer, loops: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(num_hidden_layers=LAYERS)
        self.model = Decoder(layer, loops)
        self.lm_head, self.logits_processor = ParallelLMHead(20, WIDTH), LogitsProcessor()

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return self.model(ids, positions)


def run(model: nn.Module) -> Any:
    with torch.inference_mode():
        return model(torch.arange(TOKENS), torch.arange(TOKENS))


def streams(model: Causal) -> list[Tensor]:
    """What enters each layer and the norm, computed apart: boundary 0 to n."""
    layers, positions = model.model.layers, torch.arange(TOKENS)
    with torch.inference_mode():
        found = [model.model.embed_tokens(torch.arange(TOKENS))]
        for layer in layers:
            h, r = Layer.forward(layer, positions, found[-1].clone(), None)
            found.append(h + r)
    return found


def nest(path: str, inner: nn.Module, outside: nn.Module | None = None) -> nn.Module:
    """`inner` at a dotted path below a new module (or below `outside`)."""
    root = outside or nn.Module()
    module = root
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(module, name):
            setattr(module, name, nn.Module())
        module = getattr(module, name)
    setattr(module, last, inner)
    return root


@pytest.mark.parametrize("path", LAYER_PATHS)
def test_every_known_path_leads_to_the_layers_among_a_vision_tower(path: str) -> None:
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    root = nest(path, layers, nest("vision_tower.encoder.layers", nn.ModuleList(Layer() for _ in range(9))))
    found = find_text_model(root)
    assert (found.path, found.layers, found.num_layers) == (path, layers, LAYERS)
    assert found.holder is (root.get_submodule(path.rpartition(".")[0]))


def test_the_parts_around_the_layers_are_found_from_the_inside_out() -> None:
    model = Causal()
    found = find_text_model(nest("vision_tower.norm", Norm(), nest("language_model", model)))
    assert found.path == "language_model.model.layers"
    assert found.final_norm is model.model.norm
    assert found.embed is model.model.embed_tokens
    assert found.lm_head is model.lm_head
    assert found.logits_processor is model.logits_processor
    assert found.layer_class == "Layer"


def test_a_tied_head_is_none_whether_it_is_absent_or_the_embedding() -> None:
    model = Causal()
    model.lm_head = model.model.embed_tokens
    assert find_text_model(model).lm_head is None
    del model.lm_head
    assert find_text_model(model).lm_head is None


class Wrapper(nn.Module):
    """A multimodal class: says by a method which child is the language model."""

    def __init__(self, inner: nn.Module, answer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weird_name, self.answer = inner, answer

    def get_language_model(self) -> nn.Module:
        return self.answer(self)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return self.weird_name(ids, positions)


def test_the_language_model_that_a_wrapper_names_is_asked_first() -> None:
    found = find_text_model(Wrapper(Causal(), lambda self: self.weird_name))
    assert found.path == "weird_name.model.layers"
    assert find_text_model(Wrapper(Decoder(), lambda self: self.weird_name)).path == "weird_name.layers"


def test_a_wrapper_that_marks_nothing_is_searched() -> None:
    def raises(_: Any) -> Any:
        raise NotImplementedError

    assert find_text_model(Wrapper(Causal(), raises)).path == "weird_name.model.layers"


def test_the_configuration_decides_between_two_lists() -> None:
    model = nest("one.blocks", nn.ModuleList(Layer() for _ in range(3)))
    nest("two.blocks", nn.ModuleList(Layer() for _ in range(LAYERS)), model)
    nest("mtp.blocks", nn.ModuleList(Layer() for _ in range(3)), model)
    model.config = SimpleNamespace(text_config={"num_hidden_layers": 3})  # type: ignore[assignment]
    assert find_text_model(model).path == "one.blocks"
    assert find_text_model(model, "two.blocks").num_layers == LAYERS


def test_what_was_looked_for_is_said() -> None:
    model = nest("a.items", nn.ModuleList(Layer() for _ in range(2)))
    nest("b.items", nn.ModuleList(Layer() for _ in range(2)), model)
    with pytest.raises(UserError, match="fit alike") as error:
        find_text_model(model)
    assert "model.decoder.layers" in str(error.value)
    assert "a.items (2), b.items (2)" in str(error.value)
    assert "its attributes: a, b" in str(error.value)
    with pytest.raises(UserError, match="leads to nothing"):
        find_text_model(model, "c.items")


def test_layers_of_other_pipeline_stages_are_placeholders() -> None:
    model = Causal()
    for index in (0, 1):
        model.model.layers[index] = PPMissingLayer()
    model.model.embed_tokens = PPMissingLayer()
    found = find_text_model(model)
    assert found.present == (2, 3)
    assert found.embed is None or "Missing" not in type(found.embed).__name__
    assert Taps(found, (1, 2, 3, 4)).here == (3, 4)
    with pytest.raises(UserError, match="pipeline"):
        tapped.Tap(found, (1, 2))


def test_vllm_wrappers_that_are_no_modules_are_taken_off() -> None:
    class Graph:
        def __init__(self, model: nn.Module) -> None:
            self.inner = model

        def unwrap(self) -> nn.Module:
            return self.inner

    model = Causal()
    assert find_text_model(Graph(Graph(model))).model is model  # type: ignore[arg-type]


KINDS = [Layer, StablelmDecoderLayer, SingleLayer, ManyLayer]


@pytest.mark.parametrize("kind", KINDS)
def test_taps_read_the_stream_at_every_boundary(kind: type[Layer]) -> None:
    model = Causal(kind)
    expected = streams(model)
    with Taps(find_text_model(model), range(LAYERS + 1)) as taps_:
        run(model)
        states = taps_.take(TOKENS)
    assert states.shape == (TOKENS, LAYERS + 1, WIDTH)
    torch.testing.assert_close(states, torch.stack(expected, dim=1), atol=1e-5, rtol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_check_proves_the_rule_to_the_last_digit(kind: type[Layer]) -> None:
    model = Causal(kind)
    with Probe(find_text_model(model)) as probe:
        run(model)
    check = probe.result()
    assert (check.rule, check.evidence, check.rows, check.passes) == (
        taps.known_rule(kind.__name__),
        "final norm",
        TOKENS,
        1,
    )
    assert check.difference < 1e-6


def test_the_self_check_finds_a_trap_that_the_table_does_not_know() -> None:
    model = Causal(UnknownTrapLayer)
    text = find_text_model(model)
    with Probe(text) as probe:
        run(model)
    assert taps.known_rule(text.layer_class) == "sum"
    assert probe.result().rule == "inside"


def test_the_self_check_refuses_what_neither_reading_explains() -> None:
    model = Causal(HalvingLayer)

    def undo(norm: nn.Module, args: tuple) -> tuple:
        return (args[0] / 3, args[1] * 5)

    model.model.norm.register_forward_pre_hook(undo)
    with Probe(find_text_model(model)) as probe:
        run(model)
    with pytest.raises(GateError, match=r"could not be read.*final norm") as error:
        probe.result()
    assert "sum" in str(error.value)
    assert "inside" in str(error.value)


def test_without_a_norm_in_forward_the_output_of_the_model_is_the_evidence() -> None:
    model = Causal(SingleLayer)
    model.model.norm = nn.Identity()
    model.model.forward = lambda ids, positions: _plain(model, ids, positions)  # type: ignore[method-assign]
    with Probe(find_text_model(model)) as probe:
        run(model)
    assert probe.result().evidence == "model output"


def _plain(model: Causal, ids: Tensor, positions: Tensor) -> Tensor:
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        hidden = layer(positions, hidden)
    return hidden


def test_hooks_that_never_fire_and_missing_rows_are_gates() -> None:
    model = Causal()
    text = find_text_model(model)
    with Taps(text, (1, 4)) as taps_:
        with pytest.raises(GateError, match=r"reached 0 times.*eager"):
            taps_.take(TOKENS)
        run(model)
        with pytest.raises(GateError, match="for 4 scheduled tokens"):
            taps_.take(4)
        run(model)
        run(model)
        with pytest.raises(GateError, match="reached 2 times"):
            taps_.take(TOKENS)
    with Probe(text) as probe, pytest.raises(GateError, match="saw no pass"):
        probe.result()


def test_a_looped_stack_counts_its_passes_and_keeps_the_last() -> None:
    model = Causal(SingleLayer, loops=3)
    text = find_text_model(model)
    with Probe(text) as probe:
        run(model)
    check = probe.result()
    assert check.passes == 3
    with Taps(text, (0, LAYERS), passes=check.passes) as taps_:
        output = run(model)
        states = taps_.take(TOKENS)
    torch.testing.assert_close(model.model.norm.forward(states[:, 1]), output)


@pytest.mark.parametrize("wrong", [(-1, 2), (2, LAYERS + 1)])
def test_boundaries_that_the_model_does_not_have_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(GateError, match="do not exist"):
        Taps(find_text_model(Causal()), wrong)


def test_boundary_0_of_a_layer_without_a_known_argument_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, stuff: Tensor) -> Tensor:
            return stuff

    with pytest.raises(GateError, match="its arguments are \\['stuff'\\]"):
        taps.entering(Odd())


class Region(Decoder):
    """As if decorated by @support_torch_compile: `__call__` goes straight to forward."""

    do_not_compile = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Doubling(Causal):
    """An outer class whose forward works on what the inner one returns."""

    def __init__(self, layer: type[Layer] = Layer, loops: int = 1) -> None:
        super().__init__(layer, loops)
        self.model = Region(layer, loops)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return self.model(ids, positions) * 2


@pytest.mark.parametrize("outer", [Causal, Doubling])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shim_returns_what_the_class_returned_and_the_states(outer: type[Causal], kind: type[Layer]) -> None:
    plain, model = outer(kind), shims.shim(outer)(kind)
    assert type(model).__name__ == outer.__name__
    assert isinstance(model, outer)
    torch.testing.assert_close(run(model), run(plain))
    model.set_aux_hidden_state_layers((4, 0, 2))
    hidden, aux = run(model)
    torch.testing.assert_close(hidden, run(plain))
    expected = streams(plain)
    for state, boundary in zip(aux, (0, 2, 4), strict=True):
        torch.testing.assert_close(state, expected[boundary], atol=1e-5, rtol=1e-5)
    assert model.get_eagle3_default_aux_hidden_state_layers() == (2, 2, 1)


def test_other_ids_replace_the_first() -> None:
    model = shims.shim(Doubling)()
    model.set_aux_hidden_state_layers((1, 2))
    model.set_aux_hidden_state_layers((3,))
    hidden, aux = run(model)
    torch.testing.assert_close(hidden, run(Doubling()))
    torch.testing.assert_close(aux, [streams(Doubling())[3]], atol=1e-5, rtol=1e-5)


def test_a_pass_around_the_layers_ends_the_run_instead_of_serving_stale_states() -> None:
    model = shims.shim(Doubling)()
    model.set_aux_hidden_state_layers((1, 2))
    run(model)
    model.model.forward = lambda ids, positions: (model.model.embed_tokens(ids), [])
    with pytest.raises(GateError, match=r"aux hidden states with \[\] rows"):
        run(model)


def test_what_is_collected_enters_the_hash_of_compiled_artefacts() -> None:
    keys = set()
    for ids in ((1, 2), (1, 3), (1, 2)):
        model = shims.shim(Doubling)()
        model.model.vllm_config = SimpleNamespace(additional_config={"other": 1})  # type: ignore[assignment]
        model.set_aux_hidden_state_layers(ids)
        config: Any = model.model.vllm_config
        assert config.additional_config["other"] == 1
        keys.add((config.additional_config["headstart_aux"], type(model.model).forward.__qualname__))
    assert keys == {(said, f"Region.forward[{said}]") for said in ("1,2 sum", "1,3 sum")}


def test_the_region_is_traced_as_one_graph() -> None:
    model = shims.shim(Doubling)(SingleLayer)
    model.set_aux_hidden_state_layers((0, 2, 4))
    arguments = torch.arange(TOKENS), torch.arange(TOKENS)
    traced = torch.compile(model.model.forward, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        (hidden, aux), (expected, states) = traced(*arguments), model.model.forward(*arguments)
    torch.testing.assert_close([hidden, *aux], [expected, *states])


@pytest.mark.slow
def test_the_states_survive_an_artefact_that_is_compiled_ahead_and_loaded(tmp_path: Path) -> None:
    """As vLLM does it by default (VLLM_USE_AOT_COMPILE): what a graph leaves in a list outside of it would be lost."""
    model = shims.shim(Doubling)(SingleLayer)
    model.set_aux_hidden_state_layers((0, 2, 4))
    forward, arguments = model.model.forward, (torch.arange(TOKENS), torch.arange(TOKENS))
    unguarded = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    file = tmp_path / "artefact"
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(forward, fullgraph=True, backend="inductor", options=unguarded)
        compiled.aot_compile((arguments, {})).save_compiled_function(str(file))
        with file.open("rb") as opened:
            loaded = torch.compiler.load_compiled_function(opened, f_globals=forward.__globals__)
        loaded.disable_guard_check()
        (hidden, aux), (expected, states) = loaded(model.model, *arguments), forward(*arguments)
    torch.testing.assert_close([hidden, *aux], [expected, *states])


class NativeDecoder(Decoder):
    """An inner model with vLLM's own aux path, below a wrapper that says nothing of it."""

    aux_hidden_state_layers: tuple[int, ...] = ()

    def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.aux_hidden_state_layers = layers

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        aux_hidden_states = [torch.full((TOKENS, WIDTH), float(layer)) for layer in self.aux_hidden_state_layers]
        return (self.embed_tokens(ids), aux_hidden_states) if aux_hidden_states else self.embed_tokens(ids)


def test_an_inner_model_that_delivers_is_asked_itself() -> None:
    model = shims.shim(Wrapper)(NativeDecoder(), lambda self: self.weird_name)
    assert isinstance(run(model), Tensor)
    model.set_aux_hidden_state_layers((3, 1))
    hidden, aux = run(model)
    torch.testing.assert_close(hidden, model.weird_name.embed_tokens(torch.arange(TOKENS)))
    assert [state[0, 0].item() for state in aux] == [1.0, 3.0]
    assert not tapped.delivers(type("Heir", (NativeDecoder,), {"forward": Decoder.forward})())


def test_a_draft_finds_the_embedding_wherever_it_is() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(image_token_id=7)))
    model = nest("transformer", Decoder())
    model.transformer.word_embeddings = model.transformer.embed_tokens
    del model.transformer.embed_tokens
    before = {name for name, _ in model.named_parameters()}
    make_draftable(model, config)
    assert model.model.embed_tokens is model.transformer.word_embeddings
    assert {name for name, _ in model.named_parameters()} == before


def test_a_draft_of_a_wrapper_gets_a_language_model_and_an_image_token() -> None:
    def raises(_: Any) -> Any:
        raise NotImplementedError

    model: Any = Wrapper(Causal(), raises)
    type(model).supports_multimodal = True  # type: ignore[attr-defined]
    make_draftable(model, SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(image_token_id=7))))
    assert model.get_language_model().model.embed_tokens is model.weird_name.model.embed_tokens
    assert model.config.image_token_index == 7


class Lazy:
    """vLLM's registry entry."""

    module_name, class_name = __name__, "Causal"

    def load_model_cls(self) -> type[nn.Module]:
        return Causal


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    models: dict[str, Any] = {"AForCausalLM": Lazy(), "BForCausalLM": Lazy(), "EmbeddingModel": Lazy()}
    fake = SimpleNamespace(models=models, register_model=models.__setitem__)
    tables = SimpleNamespace(_TEXT_GENERATION_MODELS={"AForCausalLM": 0, "BForCausalLM": 0}, _MULTIMODAL_MODELS={})
    inner = SimpleNamespace(registry=tables)
    for name, module in {
        "vllm": SimpleNamespace(ModelRegistry=fake, __version__="0.32.0"),
        "vllm.model_executor": SimpleNamespace(models=inner),
        "vllm.model_executor.models": inner,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(shims, "originals", {})
    monkeypatch.setattr(shims, "_made", {})
    monkeypatch.setattr(plugin, "_state", dict(plugin._state))
    return models


def test_the_plugin_does_nothing_unasked(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SHIM, raising=False)
    before = dict(registry)
    plugin.register()
    assert registry == before
    assert plugin.state()["loaded"]
    assert plugin.state()["shims"] == []


def test_the_plugin_registers_lazily_and_once(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SHIM, "AForCausalLM, NoSuchModel")
    plugin.register()
    entry = registry["AForCausalLM"]
    module, _, name = entry.partition(":")
    assert module == "headstart.engines.vllm.shims"
    assert shims._made == {}
    made = getattr(shims, name)
    assert issubclass(made, Causal)
    assert made.supports_eagle3
    plugin.register()
    assert registry["AForCausalLM"] == entry
    assert plugin.state()["shims"] == ["AForCausalLM"]
    assert plugin.state()["unknown"] == ["NoSuchModel"]
    assert plugin.state()["vllm"] == "0.32.0"
    with pytest.raises(AttributeError):
        shims.CForCausalLM  # noqa: B018


def test_all_means_decoders_that_lack_it(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flagged = type("Flagged", (Causal,), {"supports_eagle3": True})
    registry["BForCausalLM"].load_model_cls = lambda: flagged
    monkeypatch.setenv(plugin.SHIM, "all")
    monkeypatch.setattr(shims, "only_where_lacking", False)
    plugin.register()
    assert plugin.state()["shims"] == ["AForCausalLM", "BForCausalLM"]
    assert getattr(shims, registry["BForCausalLM"].partition(":")[2]) is flagged
    assert getattr(shims, registry["AForCausalLM"].partition(":")[2]) is not Causal


def test_the_name_of_a_shim_changes_with_what_it_stands_for(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM caches what it learned of a class under this name: another version or file must not find it."""
    shims.originals["AForCausalLM"] = Lazy()
    names = {shims.name_of("AForCausalLM", version) for version in ("0.32.0", "0.33.0")}
    monkeypatch.setattr(shims, "_where", lambda _: ["edited"])
    assert len(names | {shims.name_of("AForCausalLM", "0.32.0")}) == 3


def test_text_models_are_values() -> None:
    text: TextModel = find_text_model(Causal())
    with pytest.raises(AttributeError):
        text.path = "other"  # type: ignore[misc]
