"""Settings: read strictly, explained whole, and a mistake is named with what was probably meant."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headstart import config
from headstart.config import Run, Section, SettingDoc
from headstart.errors import UserError

RECIPES = resources.files("headstart").joinpath("recipes")
SECTIONS = ("target", "data", "regenerate", "vocab", "capture", "draft", "train", "evaluate", "export")
DOCUMENTED = {setting.name: setting for setting in config.settings()}


def minimal() -> dict[str, Any]:
    return {"target": {"model": "some/model"}, "data": {"sources": ["a.jsonl"]}}


def built(*overrides: str) -> Run:
    return config.build(minimal(), overrides)


def refused(*overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        built(*overrides)
    assert caught.value.exit_code == 2
    return caught.value


# --- every setting is explained ---


@pytest.mark.parametrize("setting", DOCUMENTED.values(), ids=DOCUMENTED)
def test_every_setting_has_type_default_and_meaning(setting: SettingDoc) -> None:
    assert setting.type
    assert setting.default
    assert len(setting.meaning) >= 15
    assert " " in setting.meaning
    for noise in ("typing", "Annotated", "Optional", "Literal", "Field", "None", "class", "|", "~"):
        assert noise not in setting.type


def test_every_field_is_listed_once() -> None:
    fields = [f"{section}.{name}" for section in SECTIONS for name in vars(built())[section].model_dump()]
    assert sorted(DOCUMENTED) == sorted(["directory", *fields])
    assert len(list(config.settings())) == len(DOCUMENTED)


def test_defaults_are_told_as_toml_has_them() -> None:
    """What is printed as the default can be set, and then is the default."""
    for name, setting in DOCUMENTED.items():
        if setting.default not in ("required", "absent"):
            assert built(f"{name}={setting.default}") == built(), name


def test_types_are_told_as_a_person_reads_them() -> None:
    told = {name: setting.type for name, setting in DOCUMENTED.items()}
    assert told["data.sources"] == "list of str"
    assert told["data.max_conversations"] == "int or absent"
    assert told["data.role_aliases"] == "table of str"
    assert told["data.answers"] == '"regenerate" or "keep"'
    assert told["train.betas"] == "2 floats"
    assert told["capture.aux_layers"] == "list of int or absent"


def test_sections_explain_themselves() -> None:
    for name in SECTIONS:
        assert len(type(vars(built())[name]).__doc__ or "") > 20


# --- mistakes ---


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.epoch=1", "train.epochs"),
        ("train.learning-rate=1", "train.learning_rate"),
        ("draft.norm_outputs=true", "draft.norm_output"),
        ("draft.fcnorm=true", "draft.fc_norm"),
        ("train.ttt_steps=3", "draft.ttt_steps"),  # right name, wrong section
        ("epochs=3", "train.epochs"),
        ("epocs=3", "train.epochs"),
        ("directry=x", "directory"),
        ("trian.epochs=3", "train"),
        ("seed=1", "data.seed or regenerate.seed or train.seed or evaluate.seed"),
    ],
)
def test_a_misspelt_key_gets_its_suggestion(wrong: str, meant: str) -> None:
    """Case C41."""
    error = refused(wrong)
    assert error.what.startswith(f"unknown setting {wrong.partition('=')[0].partition('.epochs')[0]}")
    assert error.do == f"did you mean {meant}?"


def test_a_key_like_no_other_gets_no_wrong_suggestion() -> None:
    assert refused("train.lr=1").do == "headstart config lists every setting"


def test_a_misspelt_required_key_is_not_called_missing() -> None:
    for wrong, meant in (({"modle": "x"}, "target.model"), ({}, None)):
        with pytest.raises(UserError) as caught:
            config.build(minimal() | {"target": wrong})
        assert caught.value.what == ("unknown setting target.modle" if meant else "the setting target.model is missing")
        assert meant is None or meant in str(caught.value)
    with pytest.raises(UserError, match=r"unknown setting tarhet\n  do: did you mean target\?"):
        config.build({"tarhet": {"model": "x"}})


@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=two",
        "train.epochs=2.5",
        "train.epochs=2.0",
        "train.epochs=true",
        'train.epochs="2"',
        "train.epochs=",
        "train.epochs=[2]",
        "train.learning_rate=fast",
        'train.learning_rate="1e-3"',
        "train.learning_rate=true",
        "evaluate.baseline=1",
        "evaluate.baseline=yes",
        "target.model=7",
        "target.model=[1]",
        "data.sources=a.jsonl",
        "data.sources=[1]",
        "data.role_aliases={a=1}",
        "data.answers=maybe",
        "train.loss=mse",
        "export.formats=['gguf']",
        "train.betas=[0.9]",
        "train=3",
        "target=some/model",
    ],
)
def test_a_value_of_the_wrong_type_is_named(override: str) -> None:
    error = refused(override)
    assert error.what.startswith(override.partition("=")[0])
    assert " = " in error.what


@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=0",
        "train.epochs=-1",
        "train.learning_rate=0",
        "train.learning_rate=inf",
        "train.learning_rate=nan",
        "train.step_decay=1.5",
        "train.betas=[0.9, 1.0]",
        "train.seed=-1",
        "data.validation_fraction=1.1",
        "data.sources=[]",
        "data.max_conversations=0",
        "vocab.size=0",
        "regenerate.temperature=-0.1",
        "regenerate.top_p=0",
        "evaluate.temperatures=[]",
        "evaluate.temperatures=[0, -1]",
        "evaluate.prompts=[]",
        "export.formats=[]",
    ],
)
def test_a_value_out_of_range_is_named(override: str) -> None:
    name, _, value = override.partition("=")
    error = refused(override)
    assert error.what.startswith(name)
    assert value.strip("[]").split(", ")[-1] in error.what


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{}", 'train.loss = {} is not allowed\n  looked for: "kl" or "tv" or .* at least 1'),
        ("{kl=0}", "train.loss.kl = 0 is not allowed\n  looked for: .* table of float, above 0"),
        ("{kl=nan}", "train.loss.kl = nan is not allowed"),
        ("{foo=1}", 'train.loss.foo is not allowed\n  looked for: "kl"'),
        ("foo", 'train.loss = "foo" is not allowed\n  looked for: "kl" or "tv"'),
    ],
)
def test_a_loss_of_nothing_is_refused_in_its_own_words(value: str, told: str) -> None:
    assert re.match(told, str(refused(f"train.loss={value}")))


LONG = "[" + "1, " * 500 + "1]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epochs=two", 'train.epochs = "two" is not allowed\n  looked for: int'),
        ("train.epochs={a=1}", "train.epochs = {a = 1} is not allowed\n  looked for: int"),
        ("train.epochs=true", "train.epochs = true is not allowed\n  looked for: int"),
        ("train.epochs=0", "train.epochs = 0 is not allowed\n  looked for: int, above 0"),
        ("train.epochs=10001", "train.epochs = 10001 is not allowed\n  looked for: int, at most 10000"),
        (f"data.max_turns=1{'0' * 400}", f"data.max_turns = 1{'0' * 59}... is not allowed\n  looked for: int, below {2**63}"),
        (f"train.epochs=1{'0' * 5000}", f'train.epochs = "1{"0" * 58}... is not allowed\n  looked for: int'),
        (f"train.epochs={LONG}", f"train.epochs = {LONG[:60]}... is not allowed\n  looked for: int"),
        ("train.learning_rate=nan", "train.learning_rate = nan is not allowed\n  looked for: float, finite"),
        ("train.betas=[0.9]", "train.betas = [0.9] is not allowed\n  looked for: 2 floats"),
        ("train.betas=[0.9, 1.5]", "train.betas[1] = 1.5 is not allowed\n  looked for: 2 floats, below 1.0"),
        ("capture.aux_layers=3", "capture.aux_layers = 3 is not allowed\n  looked for: list of int or absent"),
        ("data.answers=no", 'data.answers = "no" is not allowed\n  looked for: "regenerate" or "keep"'),
        ("evaluate.baseline=yes", 'evaluate.baseline = "yes" is not allowed\n  looked for: true or false'),
        ("target.engine_options=3", "target.engine_options = 3 is not allowed\n  looked for: table"),
        ("train=3", "train = 3 is not allowed\n  looked for: a section, [train], with settings in it"),
        ("draft={sliding_window=2, fc_norm=true}", "draft.sliding_window = 2 is below draft.ttt_steps = 5: the last step would "
         "not see the token that its chain starts from"),
        ("data.max_prompt_tokens=2048", "data.max_prompt_tokens = 2048 must be below data.max_length = 2048, or no answer fits"),
        ("draft.ttt_steps=2048", "draft.ttt_steps = 2048 must be below data.max_length = 2048"),
    ],
)  # fmt: skip
def test_an_error_names_key_value_and_what_is_allowed_and_nothing_else(override: str, said: str) -> None:
    assert str(refused(override)) == f"{said}\n  do: headstart config lists every setting"


def test_a_file_and_an_override_are_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    base = '[target]\nmodel = "m"\n[data]\nsources = ["a"]\n[train]\n'
    for line in ('epochs = "x"', "epochs = 0", "betas = [0.9]", "clip = nan", "epohcs = 1", "loss = {kl = 0}"):
        path.write_text(base + line)
        with pytest.raises(UserError) as caught:
            config.load(path)
        assert str(caught.value) == str(refused(f"train.{line}"))
    path.write_text(f"{base}epochs = 1{'0' * 5000}")
    with pytest.raises(UserError, match=r"run\.toml is not TOML"):
        config.load(path)


def test_lengths_that_leave_no_room_are_refused() -> None:
    assert "the last step would not see the token" in refused("draft.sliding_window=4").what
    built("data.max_prompt_tokens=2047")


def test_only_one_fault_is_shown_but_it_is_a_whole_one() -> None:
    error = refused("train.epochs=0", "vocab.size=0", "train.epohcs=1")
    assert str(error).splitlines() == ["unknown setting train.epohcs", "  do: did you mean train.epochs?"]


# --- overrides ---


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=2", 2),
        ("train.learning_rate=1e-3", 0.001),
        ("train.learning_rate=1", 1.0),
        ("train.loss=tv", "tv"),
        ('train.loss="tv"', "tv"),
        ("target.model=/some where/a model", "/some where/a model"),
        ("target.model=org/name#v1", "org/name#v1"),
        ("target.model=a=b", "a=b"),
        ("target.revision=2024-05-01", "2024-05-01"),
        ("target.model = spaced ", "spaced"),
        ("evaluate.baseline=false", False),
        ('data.sources=["a.jsonl", "b#.jsonl"]', ("a.jsonl", "b#.jsonl")),
        ("evaluate.temperatures=[0, 0.7]", (0.0, 0.7)),
        ("capture.aux_layers=[2, 15, 27]", (2, 15, 27)),
        ("data.role_aliases={my_model = 'assistant'}", {"my_model": "assistant"}),
        ("data.role_aliases.my_model=assistant", {"my_model": "assistant"}),
    ],
)
def test_overrides_are_toml_values_or_bare_words(override: str, expected: Any) -> None:
    section, _, key = override.partition("=")[0].strip().partition(".")
    value = getattr(getattr(built(override), section), key.partition(".")[0])
    assert value == expected
    assert type(value) is type(expected)


def test_the_last_override_wins_and_a_section_can_be_given_whole() -> None:
    assert built("train.epochs=2", "train.epochs=5").train.epochs == 5
    assert built("train={epochs = 2}", "train.clip=3").train == built("train.epochs=2", "train.clip=3").train


@pytest.mark.parametrize("override", ["train.epochs", "=3", "", "train..epochs=3", ".=3", "train.=3"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    error = refused(override)
    assert f"cannot read the setting {override!r}" in error.what
    assert error.looked_for == "section.key=value, e.g. train.epochs=2"


def test_a_value_has_nothing_inside() -> None:
    assert "model is a value, not a section" in refused("target.model.size=3").what


@given(st.text(), st.text())
def test_any_override_is_taken_or_refused_in_one_way(key: str, value: str) -> None:
    with suppress(UserError):
        built(f"target.{key}={value}")


# --- files ---


def test_paths_are_relative_to_the_file_wherever_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    (home / "chats.jsonl").touch()
    (home / "run.toml").write_text(
        'directory = "out"\n[target]\nmodel = "model"\n[data]\nsources = ["chats.jsonl", "chat*.jsonl", "sharegpt"]\n'
        '[evaluate]\nprompts = ["mt_bench", "chats.jsonl"]\n'
    )
    monkeypatch.chdir(tmp_path)
    run = config.load(Path("home/run.toml"))
    assert run.directory == str(home / "out")
    assert run.target.model == str(home / "model")
    assert run.data.sources == (str(home / "chats.jsonl"), str(home / "chat*.jsonl"), "sharegpt")
    assert run.evaluate.prompts == ("mt_bench", str(home / "chats.jsonl"))


def test_a_file_is_read_and_names_its_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[target]\nmodel = "m"\n[data]\nsources = ["a"]\n[train]\nepochs = 7\n')
    run = config.load(path, ["train.clip=2"])
    assert (run.directory, run.train.epochs, run.train.clip) == (str(tmp_path / "runs/mine"), 7, 2.0)
    assert config.load(path, ["directory=elsewhere"]).directory == "elsewhere"


def test_a_toml_error_tells_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[target]\nmodel = "m"\n[data\n')
    with pytest.raises(UserError, match=r"run\.toml is not TOML: .*line 3"):
        config.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes('[target]\nmodel = "é"'.encode("latin-1"))
    for name, fault in (("none.toml", "No such file"), ("", "Is a directory"), ("latin.toml", "is not TOML")):
        with pytest.raises(UserError, match=fault):
            config.load(tmp_path / name)


@pytest.mark.parametrize("recipe", sorted(file.name for file in RECIPES.iterdir() if file.name.endswith(".toml")))
def test_shipped_recipes_load(recipe: str) -> None:
    path = Path(str(RECIPES.joinpath(recipe)))
    raw = tomllib.loads(path.read_text())
    run = config.load(path).model_dump()
    for section, values in raw.items():
        for key, value in values.items():
            assert run[section][key] == (tuple(value) if isinstance(value, list) else value)


def test_every_demo_size_loads() -> None:
    from headstart import demonstration

    for size in demonstration.SIZES:
        run = demonstration.settings_for(size, None, ["train.epochs=9"])
        assert (run.directory, run.train.epochs) == (f"runs/demo-{size}", 9)
    with pytest.raises(UserError, match="no demo size 'huge'"):
        demonstration.settings_for("huge", None, [])


# --- the model itself ---


def test_settings_are_frozen() -> None:
    run = built()
    with pytest.raises(ValidationError, match="frozen"):
        run.train.epochs = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        run.train = run.train  # type: ignore[misc]
    assert all(issubclass(type(vars(run)[name]), Section) for name in SECTIONS)


def test_effective_settings_show_every_value() -> None:
    """Case C41: what was switched on is visible in what is stored and printed."""
    effective = built("draft.norm_output=true", "draft.fc_norm=true").model_dump(mode="json")
    assert effective["draft"]["norm_output"] is True
    assert effective["draft"]["fc_norm"] is True
    assert {f"{s}.{key}" for s in SECTIONS for key in effective[s]} | {"directory"} == set(DOCUMENTED)


def test_stored_settings_are_read_back_equal() -> None:
    run = built("data.role_aliases={a='user'}", "capture.aux_layers=[1, 2, 3]", "train.learning_rate=1")
    assert config.build(json.loads(json.dumps(run.model_dump(mode="json")))) == run
