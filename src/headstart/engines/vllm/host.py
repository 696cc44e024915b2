"""The process that holds vLLM: `python -m headstart.engines.vllm.host COMMANDS EVENTS SCRATCH`, started by launch.py.

COMMANDS and EVENTS are inherited file descriptors of two pipes, SCRATCH a folder in memory; stdout and stderr are the log.
One JSON object a line both ways; token ids are plain lists. The end of COMMANDS, also by a kill of whoever held it, ends this
process and its workers and removes SCRATCH.

A command is {"do": name, ...}; its answer is any number of events and then {"event": "done", ...results} or {"event":
"failed", "what": one line, "trace": the rest}, after which the next command is read:

    start      arguments: those of vllm.LLM; layers_path: null or a path; capture: null or {"boundaries": [rising], "rung":
               "cache" (vLLM keeps the states, connector.py hands them over) or "hooks" (layer_hooks.py)}
               -> done: facts (see `facts`), and with capture self_check
    facts      -> done: version, torch, transformers, device, dtype, max_model_len, capture, workers [pid, rank, plugin, ...],
               and of the text model: architecture, layers_path, num_layers, hidden_size, vocab_size
    generate   requests [{"id", "ids", and, where there are images, "media": fields of types.Media}]; sampling
               {temperature, top_p, max_tokens, stop_token_ids, ...} as vllm.SamplingParams has it; a request may bring its
               own "sampling" to be laid over it -> grew {"tokens": {id: how many more}} now and then; finished {"id",
               "ids": the new ones, "finish": "stop" or "length", and with media "prompt": its expanded ids}; done
    capture    requests as those of generate, include_output (with sampling; false) -> captured {"id", "path": a
               safetensors file in SCRATCH with hidden_states [tokens, boundaries, d] and token_ids [tokens]}: who reads it
               removes it; done
    top_log_probs   ids, k -> done: ids [tokens][k], values [tokens][k]: row t is about token t+1
    head       -> done: path of a safetensors file (embed, lm_head, norm_*), facts (softcap, scale, norm_eps)
    chat       chats [[messages]] -> done: ids, what vLLM's own chat template makes of each
    metrics    -> done: counters {name: number or list}, those of speculative decoding
    close      -> done, and the process ends

In place of its finished or captured event a request that vLLM refuses, or loses, has refused {"id", "why"}; the others go on.
Runs with vLLM 0.16 to 0.32; what differs between them is in `worker.py`, `connector.py` and `layer_hooks.py`.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headstart.engines.vllm import media
from headstart.engines.vllm.channel import Channel, end, one_line
from headstart.engines.vllm.handover import Files, Growth
from headstart.engines.vllm.repairs import keep_scans_out_of_llvmlite

PROBE = 24  # tokens of the self-check
FLUSH_WITHIN = 120.0  # seconds for the files of finished requests to appear


class Host:
    """vLLM and the commands that it answers. `capture`: the rung and boundaries it was started with."""

    def __init__(self, channel: Channel, scratch: Path) -> None:
        self.tell = channel.tell
        self.scratch = scratch
        self.llm: Any = None
        self.capturing: dict[str, Any] | None = None
        self._count = 0

    def start(
        self, arguments: dict[str, Any], capture: dict[str, Any] | None = None, layers_path: str | None = None
    ) -> dict[str, Any]:
        keep_scans_out_of_llvmlite()
        from vllm import LLM  # noqa: PLC0415 (takes half a minute; plugins and platform are found by it)

        self.llm = LLM(**arguments)
        self.capturing = capture
        self._workers("headstart_find", layers_path)
        if capture is None:
            return self.facts()
        found = self._self_check()
        if capture["rung"] == "hooks" and found["rule"]:
            self._workers("headstart_hooks_install", capture["boundaries"], str(self.scratch))
        return {**self.facts(), "self_check": found}

    def facts(self) -> dict[str, Any]:
        model = self.llm.llm_engine.model_config
        workers = self._workers("headstart_facts")
        first = workers[0]
        return {
            **{key: first[key] for key in ("version", "torch", "transformers", "device", "model")},
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "capture": self.capturing,
            "workers": workers,
        }

    def generate(self, requests: Sequence[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        common = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        asked = ((item, SamplingParams(**common, **{**sampling, **item.get("sampling", {})})) for item in requests)
        pictured = {item["id"] for item in requests if item.get("media")}
        answers: dict[str, list[int]] = {item["id"]: [] for item in requests}
        growth = Growth(self.tell)
        for name, output in self._run(asked):
            new = list(output.outputs[0].token_ids)
            answers[name] += new
            growth.add(name, len(new))
            if output.finished:
                read = {"prompt": list(output.prompt_token_ids)} if name in pictured else {}
                self.tell("finished", id=name, ids=answers.pop(name), finish=output.outputs[0].finish_reason, **read)
        growth.flush()
        return {}

    def capture(
        self,
        requests: Sequence[dict[str, Any]],
        include_output: bool = False,
        sampling: dict[str, Any] | None = None,
        flush_within: float = FLUSH_WITHIN,
    ) -> dict[str, Any]:
        from vllm import SamplingParams  # noqa: PLC0415

        chosen = {"temperature": 0.0, "max_tokens": 1, **(sampling or {})}
        files = Files(self.scratch, self.tell)

        def asked() -> Iterator[tuple[dict[str, Any], Any]]:
            for item in requests:
                file = files.expect(item["id"])
                extra = self._save_as(file, include_output)
                params = SamplingParams(**chosen, ignore_eos=True, detokenize=False, extra_args=extra)
                yield item, params

        for name, output in self._run(asked(), files.wait_for_room):
            if output.finished:
                files.finished(name)
            files.announce()
        self._flush(files, flush_within)
        return {}

    def top_log_probs(self, ids: list[int], k: int) -> dict[str, Any]:
        """Row t of vLLM's prompt log-probabilities is about token t: ours is about t+1, and the last is the sampled token's."""
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=k, prompt_logprobs=k, detokenize=False)
        for _, output in self._run([({"id": "probe", "ids": ids}, params)]):
            if output.finished:
                rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
                best = [sorted(row.items(), key=lambda entry: entry[1].rank)[:k] for row in rows]
                return {
                    "ids": [[token for token, _ in row] for row in best],
                    "values": [[found.logprob for _, found in row] for row in best],
                }
        raise ValueError("vLLM refused the tokens")

    def head(self) -> dict[str, Any]:
        return self._workers("headstart_export_head", str(self.scratch / "head.safetensors"))[0]

    def chat(self, chats: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        from vllm import SamplingParams  # noqa: PLC0415

        outputs = self.llm.chat(chats, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return {"ids": [list(output.prompt_token_ids) for output in outputs]}

    def metrics(self) -> dict[str, Any]:
        counters = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            counters[metric.name] = getattr(metric, "values", None) if value is None else value
        return {"counters": {name: value for name, value in counters.items() if "spec_decode" in name}}

    def close(self) -> dict[str, Any]:
        core = getattr(getattr(self.llm, "llm_engine", None), "engine_core", None)
        if core is not None:
            core.shutdown()
        return {}

    def _self_check(self) -> dict[str, Any]:
        """How the layers' outputs are to be read, proved on the live model; then whether vLLM's own capture agrees."""
        vocabulary = self._workers("headstart_facts")[0]["model"]["vocab_size"]
        tokens = min(PROBE, self.llm.llm_engine.model_config.max_model_len - 2)
        ids = [number * 37 % vocabulary for number in range(1, tokens + 1)]
        self._workers("headstart_check_start", None)
        self._pass(ids)
        found = self._workers("headstart_check_stop", None)[0]
        if self.capturing is None or self.capturing["rung"] == "hooks" or found["rule"] is None:
            return found
        self.llm.reset_prefix_cache()
        self._workers("headstart_check_start", self.capturing["boundaries"])
        file = self.scratch / "check.safetensors"
        self._pass(ids, self._save_as(file, include_output=False))
        self._step_until(file.exists, FLUSH_WITHIN)
        found["boundaries"] = self._workers("headstart_check_stop", str(file))[0]
        file.unlink()
        self.llm.reset_prefix_cache()
        return found

    def _pass(self, ids: list[int], extra: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
        if not list(self._run([({"id": "the self-check", "ids": ids}, params)])):
            raise ValueError("vLLM refused the tokens of the self-check")

    def _step_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """The last files are written by steps after the one that ended their requests."""
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
            time.sleep(0.002)
        return done()

    def _workers(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def _run(
        self, asked: Iterable[tuple[dict[str, Any], Any]], pause: Callable[[], None] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Drive vLLM until every request is answered; yields (our id, its output) of each step. Refused ones are told."""
        engine, names = self.llm.llm_engine, {}
        for item, params in asked:
            self._count += 1
            request = str(self._count)
            try:
                engine.add_request(request, media.prompt_of(item, engine.model_config), params)
                names[request] = item["id"]
            except Exception as error:  # whatever this version raises here is about this request alone
                self.tell("refused", id=item["id"], why=one_line(error))
        while engine.has_unfinished_requests():
            if pause is not None:
                pause()
            for output in engine.step():
                yield names[output.request_id], output

    def _save_as(self, file: Path, include_output: bool) -> dict[str, Any]:
        """What tells the rung in use where the states of a request go."""
        if self.capturing is None:
            raise ValueError("this engine was not started to capture")
        if self.capturing["rung"] == "hooks":
            from headstart.engines.vllm import layer_hooks  # noqa: PLC0415 (imports torch)

            return {layer_hooks.SAVE: file.stem, layer_hooks.OUTPUT: include_output}
        wanted = {"hidden_states_path": str(file), "include_output_tokens": include_output}
        return {"kv_transfer_params": wanted}

    def _flush(self, files: Files, within: float) -> None:
        if self.capturing and self.capturing["rung"] == "hooks":
            for name, why in self._workers("headstart_hooks_flush")[0].items():
                files.lost(name, why)
        self._step_until(lambda: not files.announce(), within)
        files.give_up(within)


def main(commands: int, events: int, scratch: Path) -> None:
    channel = Channel(commands, events, scratch)
    host = Host(channel, scratch)
    while True:
        command = channel.next()
        name = command.pop("do")
        try:
            result = getattr(host, name)(**command)
        except Exception as error:
            traceback.print_exc()
            channel.tell("failed", what=one_line(error), trace=traceback.format_exc())
        else:
            channel.tell("done", **result)
        if name == "close":
            end(scratch)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
