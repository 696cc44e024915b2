"""Damage to what a training or an export left on disk: the checkpoint before it is taken, or a line says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_drafts import FACTS, change_tensors, random_draft
from fixtures_models import save_llama
from fixtures_states import answered, make_store, open_tiny
from headstart import artifact, files, products
from headstart.data.store import StateStore
from headstart.errors import UserError
from headstart.formats import vllm
from headstart.training import checkpoint
from headstart.training.loop import BEST, Trainer
from test_training import interrupt, make_trainer

NEWEST, BEFORE = "step-000004", "step-000002"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    engine = open_tiny(save_llama(tmp_path_factory.mktemp("target")))
    made = make_store(engine, answered(engine, 8, 12), tmp_path_factory.mktemp("states"))
    products._onednn.fp32_precision = "none"  # for the trainings of wider fixtures, as conftest does for those of tests
    return made


def trainer_in(states: StateStore, folder: Path, **changes: object) -> Trainer:
    short = {"max_steps": 6, "checkpoint_every": 2, "validate_every": 2, "keep_checkpoints": 3}
    return make_trainer(states, folder, **(short | changes))


def interrupted(states: StateStore, folder: Path, **changes: object) -> Path:
    with pytest.raises(KeyboardInterrupt):
        interrupt(trainer_in(states, folder, **changes), at=5).run()
    assert [path.name for path in checkpoint.steps(folder / "checkpoints")] == [BEFORE, NEWEST]
    return folder


@pytest.fixture(scope="module")
def broken(states: StateStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(states, tmp_path_factory.mktemp("broken"), ema=0.9)


@pytest.fixture(scope="module")
def whole(states: StateStore, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = trainer_in(states, tmp_path_factory.mktemp("whole"), ema=0.9)
    trainer.run()
    return trainer


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def state(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        files.write_json(folder / "state.json", files.read_json(folder / "state.json") | changes)

    return change


def state_without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = files.read_json(folder / "state.json")
        del found[name]
        files.write_json(folder / "state.json", found)

    return change


def raw_state(text: str) -> Callable[[Path], None]:
    return lambda folder: files.write_text(folder / "state.json", text)


def weights(
    change: Callable[[dict[str, torch.Tensor]], Any], name: str = "draft.safetensors"
) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        change(tensors)
        save_file(tensors, folder / name)

    return changed


def optimizer(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        found = torch.load(folder / "optimizer.pt", weights_only=True)
        torch.save(change(found), folder / "optimizer.pt")

    return changed


def without_state(found: dict[str, Any], name: str) -> dict[str, Any]:
    for values in found["parts"][0]["state"].values():
        del values[name]
    return found


def one_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = torch.ones(1)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "best cut": lambda folder: cut(folder / BEST),
    "best empty": lambda folder: (folder / BEST).write_bytes(b""),
    "best gone": lambda folder: (folder / BEST).unlink(),
    "best a folder": lambda folder: ((folder / BEST).unlink(), (folder / BEST).mkdir()),
    "best of other names": weights(lambda tensors: tensors.pop("norm.weight"), BEST),
    "best of other shapes": weights(one_number, BEST),
    "state empty": raw_state("{}"),
    "state a list": raw_state("[]"),
    "state null": raw_state("null"),
    "state deep": raw_state("[" * 100_000),
    "state not UTF-8": lambda folder: (folder / "state.json").write_bytes(b"\xff"),
    "step a text": state(step="x"),
    "step a numeral": state(step="4"),
    "step of another": state(step=2),
    "step zero": state(step=0),
    "step negative": state(step=-4),
    "step null": state(step=None),
    "step true": state(step=True),
    "epoch negative": state(epoch=-1),
    "epoch beyond": state(epoch=999),
    "epoch gone": state_without("epoch"),
    "batch gone": state_without("batch"),
    "batch beyond": state(batch=10**30),
    "curves a text": state(curves="x"),
    "curves empty": state(curves=[]),
    "curves gone": state_without("curves"),
    "curves of numbers": state(curves=[1, 2, 3, 4]),
    "curves of nothing": state(curves=[{}]),
    "best tau a text": state(best_tau="1.5"),
    "best tau NaN": state(best_tau=float("nan")),
    "best tau negative": state(best_tau=-1.0),
    "best step beyond": state(best_step=5),
    "best step negative": state(best_step=-2),
    "more in the state": state(more=1),
    "optimizer {}": optimizer(lambda _: {}),
    "optimizer a list": optimizer(lambda _: [1]),
    "optimizer a tensor": optimizer(lambda _: torch.ones(3)),
    "optimizer parts a number": optimizer(lambda _: {"parts": 1}),
    "optimizer no parts": optimizer(lambda _: {"parts": []}),
    "optimizer empty parts": optimizer(lambda _: {"parts": [{}]}),
    "optimizer two parts": optimizer(lambda found: {"parts": found["parts"] * 2}),
    "optimizer no state": optimizer(lambda found: {"parts": [{**found["parts"][0], "state": {}}]}),
    "optimizer without a mean": optimizer(lambda found: without_state(found, "exp_avg")),
    "optimizer states are numbers": optimizer(
        lambda found: {"parts": [{**found["parts"][0], "state": dict.fromkeys(found["parts"][0]["state"], 1)}]}
    ),
    "weights of another draft": weights(lambda tensors: tensors.clear() or tensors.update(other=torch.ones(2))),
    "weights without one": weights(lambda tensors: tensors.pop("norm.weight")),
    "weights without an average": weights(lambda tensors: tensors.pop("ema.norm.weight")),
    "weights with one more": weights(lambda tensors: tensors.update(other=torch.ones(2))),
    "weights that broadcast": weights(one_number),
    "weights of integers": weights(lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].int()})),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_checkpoint_that_is_not_whole_gives_way_to_the_one_before(
    states: StateStore, broken: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    folder = shutil.copytree(broken, tmp_path / "work")
    damage(folder / "checkpoints" / NEWEST)
    cut(folder / BEST)
    again = trainer_in(states, folder, ema=0.9)
    again._prepare()
    best = (folder / "checkpoints" / BEFORE / BEST).read_bytes()
    assert again._restore().step == 2
    assert (folder / BEST).read_bytes() == best
    assert [path.name for path in checkpoint.steps(folder / "checkpoints")] == [BEFORE]


@pytest.mark.parametrize("damage", ["best cut", "state empty", "optimizer {}", "weights that broadcast"])
def test_the_training_that_falls_back_ends_in_the_same_bits_and_so_does_its_best_draft(
    states: StateStore, broken: Path, whole: Trainer, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(broken, tmp_path / "work")
    DAMAGE[damage](folder / "checkpoints" / NEWEST)
    again = trainer_in(states, folder, ema=0.9)
    assert again.run().step == 6
    assert all(torch.equal(t, again.draft.state_dict()[n]) for n, t in whole.draft.state_dict().items())
    assert (folder / BEST).read_bytes() == (whole.folder / BEST).read_bytes()


def test_an_intact_checkpoint_is_continued(states: StateStore, broken: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(broken, tmp_path / "work")
    again = trainer_in(states, folder, ema=0.9)
    again._prepare()
    assert again._restore().step == 4


def test_with_every_checkpoint_damaged_training_begins_anew_with_untrained_weights(
    states: StateStore, broken: Path, whole: Trainer, tmp_path: Path
) -> None:
    folder = shutil.copytree(broken, tmp_path / "work")
    for found in checkpoint.steps(folder / "checkpoints"):
        files.write_text(found / "state.json", "{}")
    again = trainer_in(states, folder, ema=0.9)
    again.run()
    assert all(torch.equal(t, again.draft.state_dict()[n]) for n, t in whole.draft.state_dict().items())


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])
@pytest.mark.parametrize("damage", [None, "cut"])
def test_without_validation_samples_the_last_draft_is_the_finished_one(
    states: StateStore, tmp_path: Path, optimizer_name: str, damage: str | None
) -> None:
    def trainer(folder: Path) -> Trainer:
        made = trainer_in(states, folder, optimizer=optimizer_name)
        made.validation = []
        return made

    with pytest.raises(KeyboardInterrupt):
        interrupt(trainer(tmp_path), at=5).run()
    newest = tmp_path / "checkpoints" / NEWEST
    assert files.read_json(newest / "state.json")["best_step"] == -1
    if damage:
        cut(newest / BEST)
    again = trainer(tmp_path)
    again._prepare()
    assert again._restore().step == (2 if damage else 4)
    again = trainer(tmp_path)
    again.run()
    found = load_file(tmp_path / BEST)
    assert all(torch.equal(t, found[n]) for n, t in again.draft.state_dict().items())


def test_the_best_draft_reaches_the_disk_before_its_checkpoint_counts(
    states: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Path] = []
    copy = files.copy
    monkeypatch.setattr(files, "copy", lambda source, path: (copied.append(path), copy(source, path)))
    trainer_in(states, tmp_path, max_steps=2).run()
    assert [path.relative_to(tmp_path).as_posix() for path in copied] == [f"checkpoints/.{BEFORE}.tmp/{BEST}"]


def put_file(path: Path, elsewhere: Path) -> None:
    del elsewhere
    path.write_text("a file\n")


def put_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("name", [".draft.partial", ".draft.old"])
@pytest.mark.parametrize("put", [put_file, put_link])
@pytest.mark.parametrize("exists", [True, False])
def test_what_stands_in_place_of_a_work_folder_is_replaced(
    tmp_path: Path, name: str, put: Callable[[Path, Path], None], exists: bool
) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    root.mkdir()
    if exists:
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("mine\n")
    put(root / name, elsewhere)
    with artifact.create(root / "draft", "draft", {}, {}) as build:
        build.file("a").write_text("a\n")
    assert sorted(path.name for path in root.iterdir()) == ["draft"]
    assert not (root / "draft").is_symlink()
    assert not exists or (elsewhere / "kept").read_text() == "mine\n"


def mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda found: found.update(t2d=change(found["t2d"]))


def offsets(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda found: found.update(d2t=change(found["d2t"]))


def wrapped(found: torch.Tensor) -> torch.Tensor:
    """Ids that rise only because int64 overflows."""
    ends = torch.iinfo(torch.int64)
    found = found.clone()
    found[1:3] = torch.tensor([ends.max - 1, ends.min])
    return found


ODD_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16)
MAPS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "t2d 0-dim": (mask(lambda _: torch.tensor(True)), "t2d"),
    "t2d a column": (mask(lambda found: found[:, None]), "t2d"),
    "t2d short": (mask(lambda found: found[:-1]), "t2d"),
    "t2d long": (mask(lambda found: torch.cat([found, torch.zeros(3, dtype=torch.bool)])), "t2d"),
    "t2d empty": (mask(lambda found: found[:0]), "t2d"),
    "t2d fractional": (mask(lambda found: found * 0.5), "t2d"),
    "d2t 0-dim": (offsets(lambda _: torch.tensor(1)), "d2t"),
    "d2t a column": (offsets(lambda found: found[:, None]), "d2t"),
    "d2t short": (offsets(lambda found: found[:-1]), "d2t"),
    "d2t empty": (offsets(lambda found: found[:0]), "d2t"),
    "d2t fractional": (offsets(lambda found: found + 0.25), "d2t"),
    "d2t bool": (offsets(lambda found: found.bool()), "d2t"),
    "d2t overflowing": (offsets(wrapped), "d2t"),
    **{f"t2d {kind}": (mask(lambda found, kind=kind: found.float().to(kind)), "t2d") for kind in ODD_TYPES},
    **{f"d2t {kind}": (offsets(lambda found, kind=kind: found.float().to(kind)), "d2t") for kind in ODD_TYPES},
}


@pytest.mark.parametrize(("change", "name"), MAPS.values(), ids=MAPS)
def test_a_vocabulary_map_of_another_kind_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], name: str
) -> None:
    refused(tmp_path, lambda found: (change(found), found.update({name: found[name].contiguous()})), name)


WEIGHT_TYPES = (torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.float8_e5m2)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "norm.weight"])
@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=str)
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, name: str, kind: torch.dtype) -> None:
    refused(tmp_path, lambda found: found.update({name: found[name].to(kind)}), name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "norm.weight"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str, value: float) -> None:
    refused(tmp_path, lambda found: found[name].view(-1)[3:4].fill_(value), name)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_maps_of_other_integers_are_read(tmp_path: Path, kind: torch.dtype) -> None:
    draft = random_draft()
    vllm.write(tmp_path, draft, FACTS)
    change_tensors(tmp_path, lambda found: found.update(d2t=found["d2t"].to(kind), t2d=found["t2d"].to(kind)))
    assert torch.equal(read(tmp_path)["draft_to_target"], draft.draft_to_target)


def refused(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], name: str) -> None:
    vllm.write(folder, random_draft(), FACTS)
    change_tensors(folder, change)
    with pytest.raises(UserError) as caught:
        read(folder)
    assert name in caught.value.what
    assert str(folder / "model.safetensors") in caught.value.what


def read(folder: Path) -> dict[str, torch.Tensor]:
    return vllm.read(folder)[1]
