"""A stand-in for vLLM with the few names that host.py uses, so that the protocol can be tested in a second."""

from __future__ import annotations

from pathlib import Path

ENGINE = '''
"""A token a step for each request; the answer to a prompt repeats its first token + 1, + 2, ..."""
import os, signal, time, types
from pathlib import Path

class SamplingParams:
    def __init__(self, **fields):
        self.extra_args = None
        self.__dict__.update(fields)

class Engine:
    def __init__(self, limit):
        self.limit, self.requests, self.late = limit, {}, []
        self.model_config = types.SimpleNamespace(dtype="torch.float32", max_model_len=limit)
    def add_request(self, name, prompt, params):
        ids = prompt["prompt_token_ids"]
        if len(ids) > self.limit:
            raise ValueError(f"prompt of {len(ids)} tokens\\nis too long")
        self.requests[name] = (ids, params, [])
    def has_unfinished_requests(self):
        return bool(self.requests)
    def step(self):
        for path, ids in self.late:
            path.write_bytes(b"%d" % len(ids))
        self.late, outputs = [], []
        for name, (ids, params, done) in list(self.requests.items()):
            if ids[0] == 13:
                print("the last words of the engine", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if ids[0] == 7:
                time.sleep(0.3)
            done.append(ids[0] + len(done) + 1)
            stopped = done[-1] in getattr(params, "stop_token_ids", ())
            finished = stopped or len(done) == params.max_tokens
            new = types.SimpleNamespace(token_ids=done[-1:], finish_reason="stop" if stopped else "length")
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[new], finished=finished))
            if finished:
                del self.requests[name]
                wanted = (params.extra_args or {}).get("kv_transfer_params")
                if wanted and ids[0] != 8:
                    self.late.append((Path(wanted["hidden_states_path"]), ids))
        return outputs

class LLM:
    def __init__(self, model, limit=8, **arguments):
        if model == "broken":
            raise RuntimeError("it cannot be loaded\\nfor many reasons")
        self.llm_engine = Engine(limit)
    def reset_prefix_cache(self):
        pass
    def get_metrics(self):
        named = lambda name, **fields: types.SimpleNamespace(name=name, **fields)
        return [named("vllm:spec_decode_num_drafts", value=3), named("vllm:spec_decode_x", values=[1, 2]), named("other", value=1)]
    def collective_rpc(self, method, args=()):
        return [getattr(self, method)(*args)]
    def headstart_find(self, path):
        return path
    def headstart_facts(self):
        model = {"vocab_size": 100}
        return {"version": "0", "torch": "0", "transformers": "0", "device": "cpu", "model": model, "plugin": {}}
    def headstart_check_start(self, boundaries):
        pass
    def headstart_check_stop(self, file):
        return {"1": 0.0} if file else {"rule": "sum"}
'''


def make_fake_vllm(folder: Path) -> dict[str, str]:
    """Write the package below `folder`; returns the environment in which a host finds it."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ENGINE)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    return {"PYTHONPATH": str(folder)}
