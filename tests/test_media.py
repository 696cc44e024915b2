"""Images in conversations: read, found, hashed, stored, refused; and what becomes of them up to the engine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fixtures_text import T_PARTS, T_PLAIN, make_tokenizer, save_tokenizer
from headstart import config, pipeline
from headstart.artifact import Artifact
from headstart.data import content, dialogue, media, rows, sources
from headstart.data.answers import AnswerLog
from headstart.data.templates import Template
from headstart.engines.base import Use
from headstart.engines.load import open_engine
from headstart.engines.vllm.arguments import media_limits
from headstart.errors import GateError, UserError
from headstart.events import Events
from headstart.types import Completion, Media, Prompt, Sample

ROLES = sources.role_names({})
Row = dict[str, Any]

T_IMAGES = T_PARTS.replace(
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}",
)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three small images in a folder."""
    save_pictures(tmp_path)
    return tmp_path


def save_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png", "c.png"):
        Image.fromarray(rng.integers(0, 255, (28, 28, 3), dtype=np.uint8)).save(folder / name)


def image(folder: Path, name: str) -> dict[str, Any]:
    found = media.find(name, folder)
    return {"type": "image", "source": found.source, "sha256": found.sha256}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def read(row: Row, folder: Path | None) -> list[Any]:
    return [message["content"] for message in sources.read_row(row, ROLES, folder)[1]]


def user(*parts: Any) -> Row:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def write(path: Path, values: list[Row]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def test_every_spelling_of_an_image_is_the_same(pictures: Path) -> None:
    raw = (pictures / "a.png").read_bytes()
    uri = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    by_path = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": str(pictures / "a.png")},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": (pictures / "a.png").as_uri()},
        {"type": "input_image", "image_url": "a.png", "text": None},
    ]
    wanted = [image(pictures, "a.png"), text("What?")]
    for part in by_path:
        assert read(user(part, text("What?")), pictures) == [wanted]
    for part in (
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "image": {"bytes": raw, "path": None}},
    ):
        (found,) = read(user(part, text("What?")), pictures)
        assert found[0]["sha256"] == wanted[0]["sha256"]
        assert media.read(*content.media_of([{"role": "user", "content": found}])) == raw


def test_images_beside_the_turns_go_where_they_are_marked(pictures: Path) -> None:
    first, second = image(pictures, "a.png"), image(pictures, "b.png")
    turns = [
        {"from": "human", "value": "<image>\nOne?"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "Two <image>?"},
    ]
    found = read({"images": ["a.png", "b.png"], "conversations": turns}, pictures)
    assert found == [[first, text("One?")], "1", [text("Two "), second, text("?")]]
    turns = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]
    assert read({"image": "a.png", "conversations": turns}, pictures) == [[first, text("One?")], "1"]
    assert read({"image": None, "conversations": turns}, pictures) == ["One?", "1"]
    unnamed = {**user({"type": "image"}, text("Two?")), "images": ["b.png"]}
    assert read(unnamed, pictures) == [[second, text("Two?")]]
    assert read({"prompt": "a <image> of text"}, pictures) == ["a <image> of text"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (user({"type": "image", "image": "none.png"}), "image not found"),
        (user({"type": "image", "image": "x" * 5000}), "image not found"),
        (user({"type": "image", "image": "text.png"}), "not an image"),
        (user({"type": "image_url", "image_url": {"url": "data:text/plain,hello"}}), "not an image"),
        (user({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}), "image on the web"),
        (user({"type": "image"}), "not text"),
        (user({"type": "image", "image": 3}), "not text"),
        (user({"type": "video", "video": "a.mp4"}), "not text"),
        ({"image": "a.png", "prompt": "<image> <image>"}, "images do not fit the text"),
        ({"images": ["a.png", "b.png"], "prompt": "<image>"}, "images do not fit the text"),
    ],
)
def test_images_that_cannot_be_used(pictures: Path, row: Row, reason: str) -> None:
    (pictures / "text.png").write_text("a text")
    with pytest.raises(sources.Unusable) as caught:
        read(row, pictures)
    assert caught.value.reason == reason


def test_a_set_without_a_folder_takes_no_images(pictures: Path) -> None:
    with pytest.raises(sources.Unusable, match="not text"):
        read(user({"type": "image", "image": str(pictures / "a.png")}), None)


def test_an_image_that_changed_is_refused_by_name(pictures: Path) -> None:
    one, two = media.find("a.png", pictures), media.find("b.png", pictures)
    assert media.check([(one, two), (), (two, two, one)]) == {"image": 3}
    (pictures / "b.png").write_bytes((pictures / "c.png").read_bytes())
    with pytest.raises(GateError, match=r"b\.png has changed"):
        media.check([(one, two)])
    (pictures / "a.png").unlink()
    with pytest.raises(GateError, match=r"a\.png cannot be read"):
        media.read(one)


def test_templates_mark_images_or_say_that_they_do_not() -> None:
    asked = {"role": "user", "content": [{"type": "image", "source": "a.png", "sha256": "0"}, text("What?")]}
    template = Template(make_tokenizer(T_IMAGES))
    assert template.places_images
    assert "user\n<image>What?<|im_end|>" in template.decode(template.prompt_ids([asked]))
    assert template.prompt_ids([{"role": "user", "content": "What?"}]) == Template(make_tokenizer(T_PLAIN)).prompt_ids(
        [{"role": "user", "content": "What?"}]
    )
    for other in (T_PARTS, T_PLAIN):
        assert not Template(make_tokenizer(other)).places_images


def test_a_template_beside_the_processor_is_found(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    with pytest.raises(UserError, match="no chat template"):
        Template.load(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": T_IMAGES}))
    assert Template.load(tmp_path).places_images


def test_samples_with_and_without_images_come_back(tmp_path: Path) -> None:
    ids, mask = np.arange(4, dtype=np.int32), np.array([False, False, True, True])
    plain = Sample("a", "a", "s", "train", ids, mask, "stop")
    pictured = Sample("b", "b", "s", "train", ids, mask, "stop", (Media("image", "x.png", "0"),), ids[1:])
    rows.write_samples(tmp_path / "plain.parquet", [plain])
    assert pq.read_schema(tmp_path / "plain.parquet").names == rows.SAMPLES.names
    rows.write_samples(tmp_path / "both.parquet", iter([plain, pictured]))
    first, second = rows.read_samples(tmp_path / "both.parquet")
    assert (first.media, first.sent) == ((), None)
    assert second.media == pictured.media
    assert second.sent is not None
    assert second.sent.tolist() == [1, 2, 3]
    assert second.input_ids.tolist() == ids.tolist()


def test_an_answer_counts_for_the_same_images_only(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "log", "salt")
    asked = Prompt("a", (1, 2), (Media("image", "x.png", "0"),))
    log.append([(asked, Completion("a", (3,), "stop", (1, 9, 9, 2)))])
    read = AnswerLog(tmp_path / "log", "salt")
    assert read.get(asked) == Completion("a", (3,), "stop", (1, 9, 9, 2))
    assert read.get(Prompt("a", (1, 2), (Media("image", "y.png", "1"),))) is None
    assert read.get(Prompt("a", (1, 2))) is None


def test_an_answer_is_cut_where_images_leave_no_room() -> None:
    answer = Completion("a", (1, 2, 3), "stop", (4, 5))
    assert dialogue.within(answer, 3) == answer
    assert dialogue.within(answer, 2) == Completion("a", (1, 2), "length", (4, 5))
    assert dialogue.within(answer, -1).ids == ()


def test_vllm_is_told_how_many_images_there_are() -> None:
    limits = {"image": 2, "video": 0, "audio": 0, "vision_chunk": 2}
    assert media_limits(Use(64, media={"image": 2})) == limits
    assert media_limits(Use(64)) == dict.fromkeys(limits, 0)


# --- the stages ---


def prepare(root: Path, template: str, source: str, **settings: Any) -> Artifact:
    folder = save_tokenizer(root / "target", template)
    (folder / "config.json").write_text("{}")
    run = make_run(folder, source, **settings)
    return pipeline.execute(run, root / "run", "prepare", Events(root / "events.jsonl", quiet=True))


def make_run(folder: Path, source: str, **settings: Any) -> config.Run:
    data = {"sources": [source], "decontaminate": [], "max_length": 256, **settings}
    return config.build({"target": {"model": str(folder), "device": "cpu"}, "data": data})


def test_prepare_keeps_images_and_counts_rows_without_theirs(pictures: Path) -> None:
    names = ["a.png", "b.png", "none.png", "a.png"]
    values = [user({"type": "image", "image": name}, text("What is it?")) for name in names]
    made = prepare(pictures, T_IMAGES, write(pictures / "chats.jsonl", values), max_drop=0.5)
    found = rows.read_conversations(made.file("conversations.parquet"))
    assert [content.media_of(item.messages)[0].source for item in found] == [str(pictures / n) for n in names[:2]]
    assert made.counts["images"] == 2
    assert made.counts["dropped"] == {"image not found": 1, "duplicate": 1}
    (where,) = made.counts["sources"].values()
    assert where["dropped"]["image not found"]["rows"] == [3]
    assert where["dropped"]["image not found"]["details"] == {"none.png": 1}


def test_prepare_stops_where_images_are_missing_or_not_read(pictures: Path) -> None:
    source = write(pictures / "gone.jsonl", [user({"type": "image", "image": "none.png"}, text("What?"))])
    with pytest.raises(UserError, match=r"image not found.*none\.png"):
        prepare(pictures, T_IMAGES, source)
    source = write(pictures / "chats.jsonl", [user({"type": "image", "image": "a.png"}, text("What?"))])
    with pytest.raises(UserError, match=r"the target reads no images") as caught:
        prepare(pictures, T_PLAIN, source)
    assert "chat template" in str(caught.value.do)


def test_images_in_parquet_columns(pictures: Path) -> None:
    raw = (pictures / "a.png").read_bytes()
    row = {"images": [{"bytes": raw, "path": "a.png"}], **user({"type": "image"}, {"type": "text", "text": "What?"})}
    pq.write_table(pa.Table.from_pylist([row]), pictures / "chats.parquet")
    made = prepare(pictures, T_IMAGES, str(pictures / "chats.parquet"))
    (found,) = rows.read_conversations(made.file("conversations.parquet"))
    assert media.read(content.media_of(found.messages)[0]) == raw


def test_stages_refuse_what_they_cannot_do_with_images(pictures: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A thing."}]
    source = write(pictures / "chats.jsonl", [{"image": "a.png", "conversations": turns}])
    prepare(pictures, T_IMAGES, source)
    events = Events(pictures / "events.jsonl", quiet=True)
    with pytest.raises(UserError, match="have images") as caught:
        open_engine(make_run(pictures / "target", source).target, Use(64, media={"image": 1}))
    assert caught.value.do == "set target.engine = 'vllm'"
    prepare(pictures, T_IMAGES, source, answers="keep")
    with pytest.raises(UserError, match="'keep' cannot be used with images"):
        pipeline.execute(make_run(pictures / "target", source, answers="keep"), pictures / "run", "regenerate", events)
