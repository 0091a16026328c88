"""Simulate four hosts on this machine: network namespaces on one bridge, each with a separate address,
loopback, Ray session and shared memory. The hosts form one Ray cluster, which requires a token.

    with played_hosts(folder, SERVER) as on:
        process = on("h1", f"{folder}/python", "grpo_trainer.py", ..., log=folder / "run.log")

test_cluster.py disconnects a host. This needs root and `ip`. Not covered: separate clocks, disks and cores.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parent.parent
CPUS = {"h1": 0, "h2": 1, "h3": 1, "h4": 1}  # CPUs that Ray may assign; h1 has the driver
START_S = 300.0  # time limit for the start of Ray on all hosts
RAY = "import forked; forked.small_ray(); from ray.scripts.scripts import main; main()"  # the command `ray`
# It stands for vLLM's server and forks the server that the test gives, which ends with this process.
FORKS = """
import os, sys
import forked
server = [os.path.dirname(__file__) + "/server.py", *sys.argv[1:]]
forked.Script(server, sys.stdout, sys.stderr, os.getcwd(), where={!r}).wait()
"""
OWN = 'mount -t tmpfs t /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs t /tmp/ray && exec "$@"'


def address_of(host: str) -> str:
    return f"10.77.0.{host[1:]}"


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def played_hosts(folder: Path, server: str, cpus: dict[str, int] = CPUS):
    """Start the hosts and yield a function that starts a program on a host.

    Args:
        server: The source of a program that stands in for vLLM's server.
        cpus: The number of CPUs that Ray may assign on each host.

    Raises:
        PermissionError: This user may not make network namespaces.
    """
    remedy = "wait for it, or remove them: cd tests; python -c 'import hosts; hosts.remove()'"
    assert not os.path.exists("/run/netns/h1"), f"another run of the tests has such hosts; {remedy}"
    if os.getuid() or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", "h1"]).returncode:
        raise PermissionError("cannot create network namespaces; run as root, with `ip` installed")
    try:
        make_links()
        started = []
        env = environment(folder, server)

        def on(host: str, *command: str, log: Path) -> subprocess.Popen:
            inside = ["ip", "netns", "exec", host, "unshare", "-m", "sh", "-c", OWN, "sh", *command]
            if host == "h1" and started:  # the driver shares its host with the head node
                inside = ["nsenter", "-t", str(started[0].pid), "-m", "-n"]
                inside += ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *command]
            options = dict(stdout=open(log, "wb"), stderr=subprocess.STDOUT, env=env, cwd=ROOT)
            started.append(subprocess.Popen(inside, start_new_session=True, **options))
            return started[-1]

        start_ray(on, folder, cpus)
        yield on
    finally:
        remove()


def make_links() -> None:
    """Create all hosts except h1, which exists already, and a bridge between all hosts."""
    run("ip link add br77 type bridge")
    run("ip link set br77 up")
    for host in CPUS:
        if host != "h1":
            run(f"ip netns add {host}")
        run(f"ip link add {host}out type veth peer name eth0 netns {host}")
        run(f"ip link set {host}out master br77 up")
        for command in (f"addr add {address_of(host)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run(f"ip -n {host} {command}")


def environment(folder: Path, server: str) -> dict[str, str]:
    """Return the environment of all programs, in which `server` replaces vLLM."""
    package = folder / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    (package / "api_server.py").write_text(FORKS.format(forked.address()))
    (package / "server.py").write_text(server)
    forked.on_path(folder)
    return os.environ | {
        "RAY_health_check_period_ms": "1000",  # Ray soon notices a disconnected host.
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_worker_niceness": "0",  # Workers run at normal priority.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "token of the test " + "x" * 20,
        "RAY_ADDRESS": f"{address_of('h1')}:6379",
        "PYTHONPATH": f"{folder / 'path'}:{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }


def start_ray(on, folder: Path, cpus: dict[str, int]) -> None:
    """Start Ray and wait until all hosts have joined, because earlier placements would not use all hosts."""
    end = time.monotonic() + START_S
    ray = [f"{folder}/python", "-c", RAY, "start", "--block", "--disable-usage-stats"]
    ray.append("--object-store-memory=100000000")
    for host, count in cpus.items():
        place = [f"--address={address_of('h1')}:6379"]
        if host == "h1":
            place = ["--head", "--port=6379", "--include-dashboard=false"]
        place += [f"--node-ip-address={address_of(host)}", f"--num-cpus={count}"]
        log = folder / f"{host}.log"
        process = on(host, *ray, *place, log=log)
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)


def remove() -> None:
    """End all programs on the hosts and remove the hosts."""
    for host in CPUS:
        pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):  # It ended with another one.
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", host])
        # Without this call the link would disappear only some time later.
        subprocess.run(["ip", "link", "del", f"{host}out"], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "del", "br77"])
