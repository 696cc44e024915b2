"""What works on the other machine: Python's own library alone, any Python from 3.8 on.

These files travel as one archive, started by ssh as `python3 .cache/headstart/agent-HASH.pyz`. The agent reads requests from stdin,
one JSON object a line (after `put`, the bytes of the files follow), and answers each with JSON lines: any number of notes, then one
result, refusal or fault. So no path, no setting and no text of a person ever meets the shell there.

A run is a folder DIR/runs/NAME: `origin.json` (whose run it is), `inputs/` and `run.toml` (as shipped), `job.json` (what to do),
`state.json` (how far that got), `log.txt`, `run/` (the run directory), and two locks: `.shipping`, held by the client that ships,
and `.alive`, held as long as anything of the run lives: it inherits the lock at its start, so no kill leaves a doubt.
"""
