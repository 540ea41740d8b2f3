"""recipes/launch/slurm.sbatch under a real Slurm: a controller and two nodes on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from agents import free_port
from conftest import ROOT, chats, only_full, read_metrics, run_plugsft

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
HOST = socket.gethostname().partition(".")[0]
NAMED = 'mount --bind "$0" /etc/hosts && exec slurmd -N "$1"'
"""Starts a node in a namespace of its own, where the names of the nodes are known."""
CONFIG = """
ClusterName=tests
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={run}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool-%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path):
    """Start Slurm; give the variables of its commands. Files play the GPUs."""
    run = tmp_path / "slurm"
    (run / "state").mkdir(parents=True)
    run.chmod(0o755)
    (run / "munge.key").write_bytes(os.urandom(1024))
    (run / "munge.key").chmod(0o400)
    first = free_port()
    values = {"run": run, "host": HOST, "port": free_port()}
    values["ports"] = f"{first}-{first + 1}"
    (run / "slurm.conf").write_text(CONFIG.format(**values))
    for gpu in ("gpu0", "gpu1"):
        (run / gpu).touch()
    (run / "gres.conf").write_text(f"Name=gpu File={run}/gpu[0-1]\n")
    env = os.environ | {"SLURM_CONF": str(run / "slurm.conf"), "PATH": PATH}
    names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
    names |= {"log-file": "munged.log", "seed-file": "seed"}
    hosts = run / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n0 n1\n")

    def slurmd(node):
        return ["unshare", "-m", "bash", "-c", NAMED, str(hosts), node]

    munged = ["munged", "--force", *(f"--{key}={run / name}" for key, name in names.items())]
    daemons = [munged, ["slurmctld"], *(slurmd(n) for n in ("n0", "n1"))]
    try:
        for daemon in daemons:
            subprocess.run(daemon, env=env, check=True, capture_output=True)
        yield env
    finally:
        if (run / "slurmctld.pid").exists():
            subprocess.run(["scancel", "--me"], env=env, capture_output=True, timeout=20)
            time.sleep(1)
        for file in run.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)


@only_full
@pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
@pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root")
def test_the_sbatch_file_trains_on_two_nodes_and_resumes(slurm, tiny, tmp_path):
    recipe = tiny(rows=chats(45), device="cpu", train={"steps": 6}, checkpoint={"every": 3})
    assert run_plugsft(recipe, f"output={tmp_path / 'alone'}").returncode == 0
    output = tmp_path / "job.txt"
    words = ["--gpus-per-node=2", "--cpus-per-task=1", f"--output={output}"]
    batch = ["recipes/launch/slurm.sbatch", str(recipe), "--ranks", "2"]
    for says in ("step 6/6", "is finished; nothing to resume"):
        job = ["sbatch", "--wait", *words, *batch]
        done = subprocess.run(job, env=slurm, cwd=ROOT, capture_output=True, text=True, timeout=300)
        text = output.read_text() if output.exists() else ""
        assert done.returncode == 0, done.stdout + done.stderr + text
        assert "this step has 2 machines, 2 GPUs each; the first is" in text
        assert "--num_processes 4 --num_machines 2 --machine_rank 1" in text
        assert says in text
    assert json.loads((tmp_path / "run/run.json").read_text())["machine"]["ranks"] == 4
    losses = [[line["loss"] for line in read_metrics(tmp_path / run)] for run in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
