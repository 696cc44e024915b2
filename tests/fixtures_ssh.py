"""A real sshd of the tests' own: on loopback and a free port, with its own keys, homes and login shells.

The login shell is what the account says, so the shell under test is put behind it with ForceCommand, which gives it the command
as a login shell gets it: `SHELL -c COMMAND`, in the home.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:" + os.environ["PATH"])
SEPARATION = Path("/run/sshd")  # where sshd, started by root, locks its unprivileged half in
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
PermitRootLogin prohibit-password
MaxStartups 50
ForceCommand {folder}/shell
"""
CLIENT = """
Host there
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/key
Host there-wrong-key
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/other_key
Host there-gone
    HostName 127.0.0.1
    Port {unused}
    IdentityFile {folder}/key
Host there-by-jump
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/key
    ProxyJump there
Host *
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


@dataclass
class Sshd:
    """One server. `config`: for ssh's -F, with the hosts of CLIENT; `home`: of who logs in."""

    folder: Path
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def config(self) -> Path:
        return self.folder / "client"

    def sessions(self) -> list[int]:
        """The server's children: one for each connection, of which the next below serve the channel."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def cut(self) -> None:
        """Kill every connection, as a network that is gone does."""
        for child in self.sessions():
            os.kill(child, signal.SIGKILL)

    def stop(self) -> None:
        self.cut()
        self.process.kill()
        self.process.wait()


def start(folder: Path, home: Path, shell: str = "sh", environment: Mapping[str, str] | None = None) -> Sshd:
    """Start a server whose sessions begin in `home`, in `shell`, with `environment` beside what sshd gives.

    On the path there, `python3` is this Python without its packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    for name in ("host_key", "key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    port, unused = _free_ports()
    kind, key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder, unused=unused))
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    path = f"{folder}/bin:/usr/local/bin:/usr/bin:/bin"
    set_shell(folder, home, shell, {"PATH": path, "OMP_NUM_THREADS": "1", **(environment or {})})
    if os.geteuid() == 0:
        SEPARATION.mkdir(mode=0o755, exist_ok=True)
    assert SSHD is not None
    process = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", folder / "sshd.log"])
    _wait_for(port, process)
    return Sshd(folder, home, process)


def set_shell(folder: Path, home: Path, shell: str, environment: Mapping[str, str]) -> None:
    """From now on, sessions run in this shell. It is given as `sh` reads it, so it may be several words."""
    given = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in {"HOME": str(home), **environment}.items()
    )
    path = folder / "shell.new"
    path.write_text(f'#!/bin/sh\n{given}cd "$HOME"\nexec {shell} -c "$SSH_ORIGINAL_COMMAND"\n')
    path.chmod(0o755)
    path.replace(folder / "shell")


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("sshd does not listen")
