"""Scripts of `cs336 launch`: mistakes, quoting, and texts that bash and readers of YAML accept."""

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.train.cluster.job import PORTS, LaunchArguments, checked
from cs336_systems.train.cluster.manifests import kubernetes, skypilot
from cs336_systems.train.cluster.slurm import script
from cs336_systems.train.cluster.yaml_text import dump
from tests.helpers import assert_refused, exit_code, refused

AWKWARD = """it's "a" $HOME `x` \\ $(date) $$ #.txt"""
"""A path with all that a shell, Kubernetes and YAML read as something else."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data.txt", AWKWARD):
        Path(name).write_bytes(bytes(4096))


def launched(cluster: str, *words: str, **flags: Any) -> str:
    """The text for a run of two nodes with the same volume on both."""
    words = ("train", "--data", AWKWARD, "--batch_size", "16", "--output", "/shared/a run", *words)
    given = {"image": "me/image:1", "volume": "claim", "nodes": 2, **flags}
    job = checked(LaunchArguments(words=words, **{cluster: True}, **given))
    return {"slurm": script, "kubernetes": kubernetes, "skypilot": skypilot}[cluster](job)


# -- YAML -------------------------------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """Read the part of YAML that manifests use, and nothing else: block mappings and lists, plain words of letters,
    JSON scalars, literal blocks."""
    lines = [(len(line) - len(line.lstrip()), line.lstrip(), line) for line in text.splitlines()]
    lines = [line for line in lines if not (line[0] == 0 and line[1].startswith("#"))]
    assert not any("\t" in line[: len(line) - len(line.lstrip())] for *_, line in lines)
    value, rest = _block(lines, 0)
    assert rest == []
    return value


ENTRY = re.compile(r'("(?:[^"\\]|\\.)*"|[\w./-]+):(?: (.*))?')
Lines = list[tuple[int, str, str]]


def _block(lines: Lines, indent: int) -> tuple[Any, Lines]:
    is_list = lines[0][1].startswith("- ")
    items: list[tuple[Any, Any]] = []
    while lines and lines[0][0] == indent and lines[0][1].startswith("- ") == is_list:
        _, line, _ = lines[0]
        if is_list and ENTRY.fullmatch(line[2:]):  # a mapping begins behind the dash
            value, lines = _block([(indent + 2, line[2:], ""), *lines[1:]], indent + 2)
            items.append((None, value))
            continue
        key, text = (None, line[2:]) if is_list else _entry(line)
        value, lines = _value(text, lines[1:], indent)
        items.append((key, value))
    keys = [key for key, _ in items]
    assert is_list or len(set(keys)) == len(keys)
    return ([value for _, value in items] if is_list else dict(items)), lines


def _entry(line: str) -> tuple[str, str]:
    match = ENTRY.fullmatch(line)
    assert match, line
    return _scalar(match[1]), match[2] or ""


def _value(text: str, rest: Lines, indent: int) -> tuple[Any, Lines]:
    if text == "|":
        count = next((i for i, (depth, line, _) in enumerate(rest) if line and depth <= indent), len(rest))
        depth = rest[0][0]
        assert all(not line or own >= depth for own, line, _ in rest[:count])
        return "\n".join(whole[depth:] for *_, whole in rest[:count]).rstrip("\n") + "\n", rest[count:]
    return (_scalar(text), rest) if text else _block(rest, rest[0][0])


def _scalar(text: str) -> Any:
    if re.fullmatch(r"[A-Za-z/][\w./-]*", text) and text not in ("true", "false", "null"):
        return text
    return json.loads(text)


def test_what_is_written_is_read_back():
    value = {
        "words": ["yes", "No", "null", "1", "1.5", "a: b", "# c", "- d", "x", "/mnt", "~", "", " e", "it's", '"', "中"],
        "numbers": [1, 2.5, True, False],
        "nested": [{"a": {"b": [{"c": "d"}]}, "e": "f"}, {"g": "h\n\n  i: |\n# j\n"}],
        "a:b": "k",
    }
    assert parsed(dump(value)) == value


def manifests(text: str) -> list[Any]:
    return [parsed(part) for part in text.split("---\n")]


@pytest.mark.parametrize("cluster", ["kubernetes", "skypilot"])
def test_a_full_reader_of_yaml_reads_the_same(cluster):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = launched(cluster)
    assert list(yaml.safe_load_all(text)) == manifests(text)


# -- shell ------------------------------------------------------------------------------------------------------------


def shell_of(cluster: str, text: str) -> str:
    """The shell script of a launch, as bash receives it."""
    if cluster == "slurm":
        return text
    if cluster == "skypilot":
        return manifests(text)[0]["run"]
    *_, shell = manifests(text)[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", shell)  # else Kubernetes would look for a variable
    return shell.replace("$$", "$")


PROGRAMS = {
    "scontrol": "echo node-a\necho node-b",
    "srun": 'while [[ $1 == --* ]]; do shift; done\n"$@"',
    "timeout": 'shift 3\n"$@"',
    "python": 'printf "%s\\0" "$@" > words\nenv -0 > variables',
}
VARIABLES = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
VARIABLES |= {"SKYPILOT_NODE_IPS": "node-a\nnode-b", "SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_NUM_NODES": "2"}


def run_in_bash(shell: str, programs: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script here, with stand-ins for the programs that it calls."""
    folder = Path("programs").absolute()
    folder.mkdir()
    for name, lines in {**PROGRAMS, **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(0o755)
    Path("job.sh").write_text(shell)
    environment = {**VARIABLES, "PATH": f"{folder}:/usr/bin:/bin", **variables}
    return subprocess.run(["bash", "job.sh"], env=environment, capture_output=True, text=True, timeout=120)


def python_words() -> list[str]:
    return Path("words").read_text().split("\0")[:-1]


def endpoint() -> str:
    (found,) = (word for word in python_words() if word.startswith("--rdzv-endpoint="))
    return found.removeprefix("--rdzv-endpoint=")


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes", "skypilot"])
def test_ranks_get_the_words_and_the_variables_that_were_given(cluster):
    """A stand-in for Python writes them down, whatever is in them."""
    text = launched(cluster, "--sample_prompt", "", "--find_nan", env=(f"A={AWKWARD}", "B=1", "2"))
    done = run_in_bash(shell_of(cluster, text), {})
    assert (done.returncode, done.stderr) == (0, "")
    words = python_words()
    start = words.index("cs336_systems")
    expected = ["train", "--data", AWKWARD, "--batch_size", "16", "--output", "/shared/a run"]
    assert words[start + 1 :] == [*expected, "--sample_prompt", "", "--find_nan"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d", "--max-restarts=3"} <= set(words[:start])
    variables = dict(line.split("=", 1) for line in Path("variables").read_text().split("\0")[:-1])
    assert (variables["A"], variables["B"], variables["OMP_NUM_THREADS"]) == (AWKWARD, "1,2", "8")
    assert re.fullmatch(r"(node-a|cs336-0\.cs336):(2\d|3[01])\d{3}", endpoint())


def test_a_port_that_is_in_use_is_left_out():
    with socket.socket() as taken:
        for port in PORTS:
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                break
        taken.listen()
        job = str(port - PORTS.start)
        done = run_in_bash(launched("slurm"), {"scontrol": "echo 127.0.0.1"}, SLURM_JOB_ID=job)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(endpoint().split(":")[1]) > port


STOPPED = "trap 'exit {}' USR1\nkill -USR1 $PPID\nwhile :; do sleep 0.05; done"
"""A stand-in for srun: the batch shell gets the signal before the time limit, and passes it on."""


@pytest.mark.parametrize(
    ("srun", "attempt", "code", "requeued"),
    [
        (STOPPED.format(1), 0, 75, True),
        (STOPPED.format(1), 19, 75, True),
        (STOPPED.format(1), 20, 75, False),
        (STOPPED.format(0), 0, 0, False),
        ("exit 3", 0, 3, False),
        ("exit 0", 0, 0, False),
    ],
    ids=["stopped", "for the last time", "too often", "done at that moment", "failed", "done"],
)
def test_when_a_slurm_job_is_requeued(srun, attempt, code, requeued):
    scontrol = 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo node-a; fi'
    done = run_in_bash(launched("slurm"), {"srun": srun, "scontrol": scontrol}, SLURM_RESTART_COUNT=str(attempt))
    assert (done.returncode, Path("requeued").exists()) == (code, requeued), done.stderr


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes", "skypilot"])
@pytest.mark.parametrize("checker", ["bash -n", "shellcheck -s bash -e SC1091,SC2016"])
def test_bash_and_shellcheck_find_nothing(cluster, checker):
    """SC1091: the file that --setup sources is not here. SC2016: a dollar sign in an argument is meant literally."""
    Path("job.sh").write_text(shell_of(cluster, launched(cluster, setup="source /shared/venv/bin/activate")))
    program, *options = checker.split()
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, *options, "job.sh"], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_setup_that_fails_ends_the_job():
    text = shell_of("skypilot", launched("skypilot", setup="false; true"))
    done = subprocess.run(["bash", "-c", text], env=VARIABLES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1


# -- what is asked of a cluster ---------------------------------------------------------------------------------------


def test_the_directives_of_slurm():
    text = launched("slurm", partition="gpu", account="me", time="2-00:00:00", stop_before=300, cpus_per_rank=4)
    found = {line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=32", "--time=2-00:00:00"} <= found
    assert {"--signal=B:USR1@300", "--requeue", "--partition=gpu", "--account=me"} <= found
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280" in text
    assert "--container-image=me/image:1 --container-mounts=/shared:/shared" in text


def test_the_job_of_kubernetes():
    service, job = manifests(launched("kubernetes", time="01:00:00"))
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 3600
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": 64, "nvidia.com/gpu": 8}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_task_of_skypilot():
    (task,) = manifests(launched("skypilot", gpu="H200"))
    assert (task["num_nodes"], task["volumes"]) == (2, {"/shared": "claim"})
    assert task["resources"]["accelerators"] == "H200:8"
    assert task["resources"]["image_id"] == "docker:me/image:1"


def test_ranks_on_cpus():
    text = launched("slurm", "--fast", "off", gpus_per_node=0, ranks_per_node=4)
    assert "gpus-per-node" not in text
    assert "NCCL" not in text
    assert "--nproc-per-node=4" in text


# -- mistakes ---------------------------------------------------------------------------------------------------------

TRAIN = "-- train --data data.txt --output /shared/run"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (TRAIN, "choose a cluster: --slurm"),
        (f"--slurm --kubernetes {TRAIN}", "exclude each other"),
        ("--slurm", "after two dashes"),
        ("--slurm -- bench", "after two dashes"),
        ("--slurm -- train", "name a file"),
        ("--slurm -- train --data nowhere.txt", "no file 'nowhere.txt'"),
        (f"--slurm {TRAIN} --stepz 3", "did you mean '--steps'?"),
        (f"--slurm {TRAIN} --steps many", "'many'"),
        (f"--slurm {TRAIN} --steps 0", "--steps must be at least 1, got 0"),
        (
            f"--slurm {TRAIN} --batch_size 16 --engine torch --tp 4",
            "--tp 4 needs 4 ranks, and there are 8; --dp_shard 0",
        ),
        (f"--slurm {TRAIN} --batch_size 16 --engine torch --pp 8 --num_layers 8", "--pp 8 needs 8 micro batches"),
        (f"--slurm --nodes 3 {TRAIN} --batch_size 16", "--batch_size 16 cannot be divided evenly among 24 ranks"),
        (f"--slurm {TRAIN} --fast graph", "--fast graph is not available with 8 ranks"),
        (f"--slurm --gpus_per_node 0 {TRAIN} --device cuda", "--gpus_per_node is 0"),
        (f"--slurm --nodes 0 {TRAIN}", "--nodes must be at least 1, got 0"),
        (f"--slurm --ranks_per_node 9 {TRAIN}", "--ranks_per_node 9 is more than"),
        (f"--slurm --time 1h {TRAIN}", "[DAYS-]HH:MM:SS"),
        (f"--slurm --time 00:01:00 {TRAIN}", "must be longer than --stop_before 120"),
        (f"--slurm --stop_before 5 {TRAIN}", "--stop_before must be at least 30, got 5"),
        (f"--slurm --name My_Job {TRAIN}", "'My_Job'"),
        (f"--slurm --partition 'a b' {TRAIN}", "--partition: 'a b'"),
        (f"--slurm --env 1A=2 {TRAIN}", "'1A' is no name"),
        (f"--slurm --env A {TRAIN}", "NAME=VALUE, got 'A'"),
        (f"--slurm --image a/b --mount /elsewhere {TRAIN}", "not below --mount /elsewhere"),
        (f"--kubernetes --image a/b {TRAIN}", "PersistentVolumeClaim"),
        (f"--skypilot --nodes 2 {TRAIN} --batch_size 16", "shared --volume"),
        (f"--skypilot --volume s3://bucket {TRAIN}", "is a bucket"),
        (f"--slurm -o data.txt/job {TRAIN}", "data.txt/job"),
        (f"--slurm {TRAIN} --batch_size 80000000000", "no machine has that; use a smaller --batch_size"),
    ],
)
def test_mistakes_are_one_line(line, named, capsys):
    assert_refused(["launch", *shlex.split(line)], [named], capsys)


@pytest.mark.parametrize(
    ("cluster", "flags", "start"),
    [
        ("slurm", "", "sbatch 'a job'"),
        ("kubernetes", "--image me/cs336 --volume v", "kubectl apply -f 'a job'"),
        ("skypilot", "--volume v", "sky jobs launch 'a job'"),
    ],
)
def test_a_written_file_is_named_with_the_command_that_starts_it(cluster, flags, start, capsys):
    words = shlex.split(f"--{cluster} {flags} -o 'a job' {TRAIN}")
    assert exit_code(["launch", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(f"cs336 launch: wrote a job; start it with: {start}\n")


@pytest.mark.parametrize("flags", ["", "--setup 'source venv/bin/activate'", "--image a/b --mount /shared"])
def test_a_script_that_runs_the_machines_own_python_says_so(flags, capsys):
    assert exit_code(["launch", *shlex.split(f"--slurm {flags} {TRAIN}")]) == 0
    printed = capsys.readouterr()
    assert ("must have this package" in printed.out) == ("must have this package" in printed.err) == (not flags)


def test_data_that_is_only_on_the_cluster(capsys):
    """The script is printed, and a line says that the data was not checked."""
    words = ["--volume", "v", "--", "train", "--data", "/shared/tokens.bin", "--output", "/shared/run"]
    assert exit_code(["launch", "--skypilot", "-o", "task.yaml", *words]) == 0
    assert "'/shared/tokens.bin' is not on this machine" in capsys.readouterr().err
    words += ["--init", "/shared/weights"]  # whose shape is not known here without flags
    assert_refused(["launch", "--skypilot", *words], ["'/shared/weights'", "--size"], capsys)
    assert exit_code(["launch", "--skypilot", "-o", "other.yaml", *words, "--size", "small"]) == 0
    assert "'/shared/weights' is not on this machine" in capsys.readouterr().err
    assert "--data /shared/tokens.bin" in Path("task.yaml").read_text()
    documents = shlex.split("--volume v -- train --data /shared/tokens --pack documents --output /shared/run")
    assert exit_code(["launch", "--skypilot", "-o", "documents.yaml", *documents]) == 0
    assert "--data /shared/tokens --pack documents" in Path("documents.yaml").read_text()
    capsys.readouterr()
    assert_refused(["launch", "--skypilot", *documents, "--compile"], ["--pack documents", "--compile"], capsys)


EIGHT_BILLION = "-- train --data /shared/tokens.bin --output /shared/run --size llama3/8B --precision bf16"


@pytest.mark.parametrize(
    ("gpu", "flags", "named"),
    [
        ("h100", "--parallel ddp", "needs 119.7 GiB of memory, and --gpu h100 has 79.2 GiB"),
        ("h200", "--parallel ddp", ""),
        ("h100", "--parallel fsdp", ""),
        ("h100", "--engine torch --tp 8 --context_length 8192", "predicted to fit with --micro_batch_size 4"),
        ("h100", "--engine torch --tp 8 --context_length 8192 --checkpoint_blocks 1", ""),
        ("80GB", "--parallel ddp", "needs 119.7 GiB of memory, and --gpu 80GB has 74.5 GiB"),
        ("h1000", "", "unknown --gpu 'h1000' (did you mean 'h100'?)"),
        ("h100", "--device cpu", "--gpu h100 names a card, and the ranks run on CPUs; leave it out"),
    ],
)
def test_a_named_card_must_hold_a_step(gpu, flags, named, capsys):
    """Without the name of a card nothing is known of its memory, and nothing is refused."""
    line = f"launch --slurm --setup true --gpu {gpu} {EIGHT_BILLION} {flags}"
    if named:
        assert_refused(shlex.split(line), [named], capsys)
        return
    assert exit_code(shlex.split(line)) == 0
    assert exit_code(shlex.split(line.replace(f"--gpu {gpu} ", ""))) == 0


def test_cards_that_only_skypilot_knows(capsys):
    words = shlex.split(f"launch --skypilot --volume v --gpu A100-80GB {EIGHT_BILLION} --parallel ddp")
    assert exit_code(words) == 0
    printed = capsys.readouterr()
    assert "A100-80GB:8" in printed.out
    assert "the memory of --gpu A100-80GB is not known" in printed.err
    words.remove("--gpu")
    words.remove("A100-80GB")
    assert exit_code(words) == 0
    assert "H100:8" in capsys.readouterr().out


def test_data_of_a_slurm_cluster_is_an_absolute_path(tmp_path, capsys):
    """A laptop does not have it. A relative path is below the folder of the submission, and a file that is here is
    checked whatever its path."""
    train = ["launch", "--slurm", "--setup", "true", "--", "train", "--data"]
    assert exit_code([*train, "/shared/tokens.bin"]) == 0
    printed = capsys.readouterr()
    assert "--data /shared/tokens.bin" in printed.out
    assert printed.err.count("\n") == 1
    assert "'/shared/tokens.bin' is not on this machine: it was not checked" in printed.err
    assert exit_code([*train, str(tmp_path / "tokenz.bin")]) == 0  # perhaps a mistake of a login node
    assert f"its folder {str(tmp_path)!r} is: is the name right?" in capsys.readouterr().err
    with refused("no file 'tokens.bin' here; give the absolute path"):
        checked(LaunchArguments(slurm=True, words=("train", "--data", "tokens.bin")))
    (tmp_path / "lines.jsonl").write_text("{}")
    with refused("has documents to tokenize first"):
        checked(LaunchArguments(slurm=True, words=("train", "--data", str(tmp_path / "lines.jsonl"))))
    with refused("--steps must be at least 1"):  # the other flags are checked without the data
        checked(LaunchArguments(slurm=True, words=("train", "--data", "/shared/tokens.bin", "--steps", "0")))
