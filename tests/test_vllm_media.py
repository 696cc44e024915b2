"""Images through the real vLLM: a tiny LLaVA answers and is captured; its states are those of Transformers' LLaVA."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from headstart import artifact, config, pipeline
from headstart.config import Target
from headstart.data import content, rows
from headstart.data.store import StateStore, Stored, label_rows
from headstart.engines.base import Refused, Use
from headstart.engines.vllm.engine import VllmEngine
from headstart.errors import GateError
from headstart.events import Events
from headstart.stages import capture, regenerate
from headstart.types import Completion, Media, Prompt, Sample, Sampling
from test_media import T_IMAGES, image, save_pictures, text, user
from vllm_models import FIRST_TOKEN, LAYERS, save_model

pytestmark = pytest.mark.slow

AUX = (1, 2, 3)
PLACEHOLDERS = 4  # of one image of this model
USE = Use(longest=160, batch_size=4, batch_tokens=96, boundaries=AUX, media={"image": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and images."""
    made = tmp_path_factory.mktemp("media")
    save_pictures(made)
    target = save_model("llava", made / "target")
    (target / "chat_template.jinja").write_text(T_IMAGES)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    running = VllmEngine(Target(model=str(folder / "target"), engine="vllm", device="cpu"), USE)
    yield running
    running.close()


@pytest.fixture(scope="module")
def made(folder: Path, engine: VllmEngine) -> tuple[config.Run, Path]:
    """A run from the data to its states, with the shared engine in both stages that need one."""
    chats = [
        user(image_of("a.png"), text("What is it?")),
        user(image_of("b.png"), text("What is it?")),
        user(text("Which of "), image_of("c.png"), text(" and "), image_of("a.png"), text("?")),
        user(text("What did she see?")),
        {"messages": [*user(image_of("c.png"), text("Why?"))["messages"], {"role": "assistant", "content": "."}]},
    ]
    chats[-1]["messages"].append({"role": "user", "content": "And the birds?"})
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps({"id": f"c{i}", **chat}) + "\n" for i, chat in enumerate(chats)))
    run = config.build(
        {
            "target": {"model": str(folder / "target"), "engine": "vllm", "device": "cpu"},
            "data": {"sources": [str(source)], "decontaminate": [], "max_length": 160, "validation_fraction": 0.2},
            "regenerate": {"max_new_tokens": 8},
            "vocab": {"size": 256},
            "capture": {"aux_layers": list(AUX)},
        }
    )
    asked: list[Use] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "close", lambda: None)
        for stage in (regenerate, capture):
            patched.setattr(stage, "open_engine", lambda target, use: asked.append(use) or engine)
        pipeline.execute_all(run, folder / "run", Events(quiet=True), until="capture")
    assert [use.media for use in asked] == [{"image": 2}, {"image": 2}]
    return run, folder / "run"


def image_of(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def samples_of(root: Path) -> dict[str, Sample]:
    found = rows.read_samples(artifact.open_artifact(root / "conversations", "conversations").file("samples.parquet"))
    return {sample.id: sample for sample in found}


def stored(root: Path) -> dict[str, Stored]:
    store = StateStore.open(artifact.open_artifact(root / "states", "states"))
    return {entry.id: store.read(entry) for entry in store.entries}


def test_placeholders_are_expanded_once_in_the_samples(made: tuple[config.Run, Path], folder: Path) -> None:
    samples = samples_of(made[1])
    counted = {name: int((sample.input_ids == FIRST_TOKEN).sum()) for name, sample in samples.items()}
    images = {name: len(sample.media) for name, sample in samples.items()}
    assert images == {"c0:00": 1, "c1:00": 1, "c2:00": 2, "c3:00": 0, "c4:00": 1, "c4:01": 1}  # c4 has two turns
    assert counted == {name: PLACEHOLDERS * number for name, number in images.items()}
    for sample in samples.values():
        assert not sample.supervised[sample.input_ids == FIRST_TOKEN].any()
        if sample.sent is not None:
            assert int((sample.sent == FIRST_TOKEN).sum()) == len(sample.media)
    assert [item.source for item in samples["c2:00"].media] == [str(folder / "c.png"), str(folder / "a.png")]


def test_states_are_those_of_transformers_over_the_same_images(made: tuple[config.Run, Path], folder: Path) -> None:
    samples, states = samples_of(made[1]), stored(made[1])
    assert states.keys() == samples.keys()
    target = folder / "target"
    model = transformers.LlavaForConditionalGeneration.from_pretrained(target, dtype=torch.float32).eval()
    pixels = transformers.AutoProcessor.from_pretrained(target).image_processor
    worst = 0.0
    for name, sample in samples.items():
        aux, last = reference(model, pixels, sample)
        last = last[torch.from_numpy(label_rows(sample.supervised))]
        worst = max(worst, float((states[name].aux - aux).abs().max()), float((states[name].last - last).abs().max()))
    assert worst < 5e-5  # measured: 6e-6, of values up to 10


def reference(model: torch.nn.Module, pixels: object, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [tokens, n_aux, d] and last [tokens, d] of Transformers' own model, the last by a hook: what it calls the last
    hidden state is normed."""
    given = {}
    if sample.media:
        opened = [Image.open(item.source).convert("RGB") for item in sample.media]
        given["pixel_values"] = pixels(opened, return_tensors="pt")["pixel_values"]  # pyright: ignore[reportCallIssue]
    found: list[torch.Tensor] = []
    layer = model.get_submodule("model.language_model.layers")[LAYERS - 1]  # pyright: ignore[reportIndexIssue]
    handle = layer.register_forward_hook(lambda _, __, output: found.append(output))
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True, **given).hidden_states
    handle.remove()
    return torch.stack([states[b][0] for b in AUX], 1), found[0].reshape(ids.shape[1], -1)


def test_another_image_gives_other_states_at_and_after_it(made: tuple[config.Run, Path]) -> None:
    samples, states = samples_of(made[1]), stored(made[1])
    first, second = samples["c0:00"], samples["c1:00"]
    prompt = int(first.supervised.argmax())
    assert first.input_ids[:prompt].tolist() == second.input_ids[:prompt].tolist()
    place = int((first.input_ids == FIRST_TOKEN).argmax())
    difference = (states["c0:00"].aux[:prompt, -1] - states["c1:00"].aux[:prompt, -1]).abs().amax(-1)
    assert float(difference[:place].max()) < 1e-4
    assert float(difference[place:].min()) > 1e-2


def test_the_ids_are_those_of_vllms_own_chat(engine: VllmEngine, folder: Path) -> None:
    """What we send as ids and images, against the same messages given to vLLM's chat."""
    uri = f"data:image/png;base64,{base64.b64encode((folder / 'b.png').read_bytes()).decode()}"
    chat = user({"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": uri}})["messages"]
    (wanted,) = engine._ask("chat", chats=[chat])["ids"]
    (answer,) = ask(engine, "See <image>", (media_of(folder, "b.png"),))
    assert isinstance(answer, Completion)
    assert answer.prompt == tuple(wanted)
    assert wanted.count(FIRST_TOKEN) == PLACEHOLDERS


def test_what_cannot_be_read_is_refused_alone(engine: VllmEngine, folder: Path) -> None:
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:60])
    good, broken = media_of(folder, "a.png"), media_of(folder, "broken.png")
    changed = Media("image", good.source, broken.sha256)
    answers = [ask(engine, "<image>", (item,))[0] for item in (broken, changed, good)]
    assert isinstance(answers[0], Refused)
    assert isinstance(answers[1], Refused)
    assert "has changed" in answers[1].why
    assert isinstance(answers[2], Completion)
    (missing,) = ask(engine, "no mark", (good,))
    assert isinstance(missing, Refused)


def test_a_changed_image_stops_the_capture(made: tuple[config.Run, Path], folder: Path) -> None:
    """The last one: it changes an image of the run."""
    run, root = made
    (folder / "b.png").write_bytes((folder / "c.png").read_bytes())
    with pytest.raises(GateError, match=r"b\.png has changed"):
        pipeline.execute(
            run.model_copy(update={"capture": run.capture.model_copy(update={"shard_tokens": 64})}),
            root,
            "capture",
            Events(quiet=True),
        )


def media_of(folder: Path, name: str) -> Media:
    return content.media_of([{"role": "user", "content": [image(folder, name)]}])[0]


def ask(engine: VllmEngine, words: str, media: tuple[Media, ...]) -> list[Completion | Refused]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(engine.folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}], add_generation_prompt=True, tokenize=False
    )
    prompt = Prompt("one", tuple(tokenizer(ids, add_special_tokens=False)["input_ids"]), media)
    return list(engine.generate([prompt], Sampling(4, 0.0, 1.0, 0, (2,))))
