"""A SuperLink and SuperNodes as real processes on this machine, with TLS and registered nodes, for tests."""

import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import warm

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "federate"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1",
}
MARK = "NETWEIGHT_TEST_FEDERATION"
# What SuperNodes and the SuperLink start by themselves, for every answer anew, and what it imports each time.
THEIRS = ("flwr-clientapp", "flwr-serverapp", "flower-superexec")
IMPORTED = (
    "torch", "flwr.supernode.cli", "flwr.superlink.cli", "flwr.supercore.cli", "netweight.plugins.flower.server",
    "netweight.data.images", "netweight.methods.federate.partition", "netweight.methods.federate.algorithms.direct",
)  # fmt: skip
FORKED = """#!{python} -IS
import fcntl, json, os, sys
with open({pipe!r}, "w") as pipe:
    fcntl.flock(pipe, fcntl.LOCK_EX)
    asked = dict(words=[{program!r}, *sys.argv[1:]], environment=dict(os.environ), folder=os.getcwd())
    print(json.dumps(dict(asked, out={log!r}, err={log!r})), file=pipe, flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(condition, seconds, what, every=0.3):
    """Wait until a condition holds and return it; a test fails that waits in vain."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"waited {seconds} seconds in vain for {what}")


class Processes:
    """Whatever is started here and by what is started here: all of it carries a mark in its environment."""

    def __init__(self, folder):
        self.folder, self.started, self.mark = folder, {}, uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "RAY_"))}
        self.environment = {
            **inherited,
            **QUIET,
            MARK: self.mark,
            "HOME": str(folder),
            "FLWR_HOME": str(folder / "flwr"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        (folder / "flwr").mkdir()

    def fork(self):
        """From now on let what Flower starts by itself be forks of one process that has imported it (`warm`)."""
        own, pipe, log = self.folder / "bin", self.folder / "asked", str(self.folder / "forked.log")
        own.mkdir()
        os.mkfifo(pipe)
        self.environment["PATH"] = f"{own}:{self.environment['PATH']}"
        for program in THEIRS:
            words = {"python": sys.executable, "pipe": str(pipe), "program": str(BIN / program), "log": log}
            (own / program).write_text(FORKED.format(**words))
            (own / program).chmod(0o755)
        held = os.open(pipe, os.O_RDWR)
        with open(log, "ab") as errors:
            self.started["forks"] = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("warm.py"), *IMPORTED], stdin=held, stderr=errors,
                stdout=subprocess.DEVNULL, env=self.environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        os.close(held)

    def start(self, name, program, *arguments):
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / program), *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        return self.started[name]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *arguments, seconds=400):
        """Call the command `flwr` and return what it says as JSON."""
        words = (BIN / "flwr", *arguments, "--format", "json")
        done = warm.run(*words, env=self.environment, cwd=self.folder, timeout=seconds, libraries=("flwr.cli.app",))
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"flwr {arguments}: rc {done.returncode}\n{done.stdout}\n{done.stderr}") from None

    def living(self):
        """Process id → command of all that carry the mark and live."""
        found = {}
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                        found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def end(self, name):
        """Stop a process that was started here in an orderly way."""
        process = self.started.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    def kill(self, name):
        """Kill a process that was started here and its whole group, without warning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.started[name].pid, signal.SIGKILL)
        self.started.pop(name).wait(30)

    def stop(self):
        """Stop all in an orderly way, then whatever is left; return what had to be killed."""
        for process in reversed(list(self.started.values())):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        stubborn = self.living()
        for number in stubborn:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in self.started.values():
            process.wait(20)
        wait(lambda: not self.living(), 30, f"the end of {self.living()}")
        return stubborn


class Deployment(Processes):
    """A SuperLink with TLS and node authentication, and nodes that are registered unless asked otherwise.

    It remembers in a file only what it shall know after its own death: Flower's database answers "locked" under load.
    """

    def __init__(self, folder, nodes=3, remembers=False):
        super().__init__(folder)
        self.port, self.keys, self.nodes = free_port(), folder / "keys", nodes
        self.database = ("--database", folder / "state.db") if remembers else ()
        subprocess.run([sys.executable, EXAMPLE / "make_certificates.py", self.keys, str(nodes + 1)], check=True)
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys / "ca.crt"}"\n'
        )

    def start_server(self):
        keys, where = self.keys, ("--host", "127.0.0.1", "--port", self.port, *self.database)
        certificates = ("--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.pem")
        process = self.start(
            "server",
            "flower-superlink",
            *certificates,
            "--ssl-keyfile",
            keys / "server.key",
            "--enable-supernode-auth",
            *where,
        )
        context = ssl.create_default_context(cafile=str(keys / "ca.crt"))

        def answers():
            assert process.poll() is None, self.log("server")
            with contextlib.suppress(OSError):
                address = f"https://127.0.0.1:{self.port}/health"
                return urllib.request.urlopen(address, context=context, timeout=5).status == 200

        wait(answers, 90, "the SuperLink")

    def register(self, node):
        self.flwr("supernode", "register", self.keys / f"node-{node}.pub", "tls")

    def start_node(self, node, **config):
        config = {"partition-id": node, "private-folder": str(self.folder / f"private-{node}"), **config}
        listed = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        where = ("--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", free_port())
        return self.start(
            f"node-{node}",
            "flower-supernode",
            "--root-certificates",
            self.keys / "ca.crt",
            *where,
            "--auth-supernode-private-key",
            self.keys / f"node-{node}",
            "--max-wait-time",
            "30",
            "--node-config",
            listed,
        )

    def online(self):
        return [node for node in self.flwr("supernode", "list", "tls").get("nodes", ()) if node["status"] == "online"]

    def run(self, app, **config):
        """Run an app and return the run's id."""
        listed = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        begun = self.flwr("run", app, "tls", "--run-config", listed)
        assert "run-id" in begun, begun
        return begun["run-id"]

    def status(self, run):
        """How a run stands; "unknown" where a busy SuperLink does not say."""
        runs = self.flwr("list", "tls", "--run-id", run).get("runs")
        return runs[0]["status"] if runs else "unknown"

    def finish(self, run, seconds=400):
        """Wait until a run has ended and return how."""

        def ended():
            status = self.status(run)
            return status if status.startswith("finished") else None

        return wait(ended, seconds, f"run {run}; {self.log('server')[-3000:]}", every=4.0)


class Simulation(Processes):
    """Flower's simulation: one SuperLink that starts on its own, nodes in processes of Ray."""

    def __init__(self, folder, nodes=3):
        super().__init__(folder)
        self.environment["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = str(free_port())
        (folder / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local-in-memory:"\n'
        )
        self.federation = (
            f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2 "
            "init-args-logging-level='ERROR' init-args-log-to-driver=false"
        )

    def finish(self, app, seconds=400, **config):
        """Run an app and return how it ended."""
        listed = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        options = ("--run-config", listed, "--federation-config", self.federation)
        run = self.flwr("run", app, "local", *options, seconds=seconds)["run-id"]

        def ended():
            status = self.flwr("list", "local", "--run-id", run)["runs"][0]["status"]
            return status if status.startswith("finished") else None

        return wait(ended, seconds, f"run {run}", every=4.0)


def example_task(config, clients=3):
    """The task that the example's app makes, with the data of all clients."""
    from netweight.methods.federate import Task
    from netweight.plugins.flower.server import halves_of

    app = runpy.run_path(str(EXAMPLE / "app.py"))
    return Task(*halves_of(app["model"], config), app["everyones_data"](config.get("data", "digits"), clients))


def faulty_example(folder):
    """A copy of the example whose clients do in round 1 what `fault` says, such as "hang 1" or "raise 2; late90 3".

    "broken 1" raises in every round.
    """
    copy = folder / "faulty"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "app.py").rename(copy / "sound.py")
    (copy / "app.py").write_text(FAULTY)
    described = copy / "pyproject.toml"
    described.write_text(described.read_text() + 'fault = ""\nsigns = ""\n')
    return copy


def lying_example(folder):
    """A copy of the example some of whose clients lie as `lie` says, such as "claimed 2" or "colluding 5 6"."""
    copy = folder / "lying"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    described, app = copy / "pyproject.toml", copy / "app.py"
    described.write_text(described.read_text() + 'lie = ""\n')
    app.write_text(app.read_text().replace("\nboth = apps(model, data)\n", LYING))
    return copy


LYING = """
def lying(config):
    from netweight.methods.federate.malicious_clients import WithMaliciousClients
    from netweight.plugins.flower.server import method_of

    lie, _, liars = str(config["lie"]).partition(" ")
    return WithMaliciousClients(method_of(config), lie, tuple(map(int, liars.split()))) if lie else method_of(config)


both = apps(model, data, lying)
"""

FAULTY = """
import time
from pathlib import Path

from flwr.clientapp import ClientApp
from sound import client as sound
from sound import both

server = both.server
client = ClientApp()


@client.query()
def query(message, context):
    return sound(message, context)


@client.train()
def train(message, context):
    faults = [one.split() for one in str(context.run_config["fault"]).split(";") if one.strip()]
    fault = next((name for name, *ill in faults if str(context.node_config["partition-id"]) in ill), None)
    if fault == "broken":
        raise RuntimeError("out of memory")
    if fault and message.metadata.group_id == "1":
        masked = message.content.config_records.get("secaggplus_configs")
        if fault.startswith("late"):
            time.sleep(float(fault[4:]))
        elif fault == "hang":
            (Path(context.run_config["signs"]) / "hangs").touch()
            time.sleep(900)
        elif masked is None or masked["stage"] == "collect_masked_vectors":
            raise RuntimeError("out of memory")
    return sound(message, context)
"""
