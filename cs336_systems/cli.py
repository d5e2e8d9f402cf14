"""`cs336 <command>`: one function per command. What it needs is imported inside it, so that --help is instant."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cs336_systems import __version__
from cs336_systems.commands import flags_named, guarded
from cs336_systems.config import UserError, flag
from cs336_systems.experiments.bench_command import BenchArguments, bench
from cs336_systems.experiments.bench_command import __doc__ as bench_manual
from cs336_systems.experiments.catalogue import ALL, catalogue, runnable
from cs336_systems.experiments.inspect_command import InspectArguments
from cs336_systems.experiments.profile_command import ProfileArguments
from cs336_systems.experiments.ranks.plan_cells import PlanArguments
from cs336_systems.experiments.ranks.rehearsal_command import RehearseArguments
from cs336_systems.experiments.session import OUTPUT, SessionArguments
from cs336_systems.experiments.spec import HANDOUT_2026, PRESETS
from cs336_systems.experiments.steps.optimize_command import OptimizeArguments
from cs336_systems.files import write_failure, write_file
from cs336_systems.flags import Parser, add_flags, flags_of, one_line, read_flags
from cs336_systems.predict.fit import FitArguments
from cs336_systems.predict.model_flags import OWN_MODEL, ShapeArguments
from cs336_systems.table import FORMATS
from cs336_systems.train.cluster.job import LaunchArguments
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.tokens.tokenize_command import TokenizeArguments

if TYPE_CHECKING:
    from cs336_systems.measure.doctor import Finding


@dataclass(frozen=True)
class RunArguments(SessionArguments):
    names: tuple[str, ...] = flag(
        (), f"experiments: {', '.join(runnable())}; or {ALL} of the preset", positional=True, metavar="NAME"
    )
    preset: str = flag(
        "quick", "grid: quick (about a minute), course (2025 handout), 2026 (that handout), full", PRESETS
    )


def run(arguments: RunArguments) -> int:
    """Measure named experiments; a cell that several ask for is measured once."""
    from cs336_systems.config import RunConfig
    from cs336_systems.experiments.catalogue import Request, cells
    from cs336_systems.experiments.session import run_session
    from cs336_systems.record import output_file

    if not arguments.names:
        raise UserError(f"name at least one experiment, or {ALL}: {', '.join(runnable())}")

    def requests_on(device: str, gpu_memory: int | None) -> list[Request]:
        base = RunConfig(device=device, warmup_steps=arguments.warmup_steps)
        return cells(arguments.names, arguments.preset, base, gpu_memory, num_steps=arguments.num_steps)

    requests_on(arguments.device or "cuda", None)  # reports mistakes before a process is started
    path = output_file(arguments.output or f"runs/{arguments.preset}")
    session = run_session(arguments, path, requests_on, skip_slow=arguments.preset == "quick")
    if session.device == "cpu":
        names = " ".join(arguments.names)
        preset = HANDOUT_2026 if arguments.preset == HANDOUT_2026 else "course"
        print(f"next, on a machine with a GPU: cs336 run {names} --preset {preset}")
    return session.code


def profile(arguments: ProfileArguments) -> int:
    """Kernels and memory of a step: tables and charts, and files to look into: a trace for Perfetto (kernels), a page
    with a timeline (memory), and on a GPU a snapshot for memory_viz. The last lines say where they are.

    cs336 profile --size small --mode train-step
    cs336 profile --size 2.7B --precision bf16 --attention auto --only memory --output runs/memory
    """
    from cs336_systems.experiments.profile_command import run_profile

    return run_profile(arguments)


def inspect(arguments: InspectArguments) -> None:
    """Show a trace or a memory snapshot recorded elsewhere: kernels as tables, memory as tables and a page.

    With --critical_path or --what_if the answer is the time of a step, replayed from a trace (docs/WHAT_IF.md).

    cs336 inspect trace.json.gz nsys.sqlite
    cs336 inspect snapshot.pickle
    cs336 inspect trace.json.gz --critical_path
    cs336 inspect trace.json.gz --what_if attention=0.8 --what_if "attention=3.1ms,host=0.5"
    cs336 inspect trace.json.gz --what_if attention=3.1ms/48 --step_time 75ms
    """
    from cs336_systems.experiments.inspect_command import inspected, scenarios

    if not arguments.files:
        raise UserError("name a trace (.json, .json.gz, .sqlite) or a memory snapshot (.pickle)")
    scenarios(arguments)  # reports mistakes before a file is read
    for file in arguments.files:
        for found in inspected(Path(file), arguments):
            print(found.render(arguments.format), end="\n\n")


@dataclass(frozen=True)
class MemoryArguments(ShapeArguments):
    model: str | None = flag(None, f"{OWN_MODEL} (traced)", excludes=("attention", "checkpoint_blocks"))
    gpu: str = flag("", "card, such as h200: says whether a step fits on it; a memory budget is planned for it")
    trace: bool = flag(False, "also trace every operator of a step, without touching memory (imports torch)")
    format: str = flag("terminal", "table format", FORMATS)


def memory(arguments: MemoryArguments) -> None:
    """Predict the memory of a step part by part, and where its peak is; no GPU needed.

    cs336 memory --size 2.7B --context_length 512 --precision bf16
    cs336 memory --size 2.7B --precision bf16 --attention auto --fast on --gpu h100
    cs336 memory --size xl --checkpoint_blocks 4 --trace
    cs336 memory --size 2.7B --context_length 4096 --precision bf16 --attention auto --fast on --memory_budget 60GiB
    """
    from cs336_systems.experiments.memory.calculator import memory_tables

    config = arguments.predicted_config(model_factory=arguments.model)
    tables = memory_tables(config, gpu=arguments.gpu, trace=arguments.trace)
    print("\n\n".join(found.render(arguments.format) for found in tables))


def fit(arguments: FitArguments) -> None:
    """Show which sizes, contexts and batches fit on a GPU, and the largest that does; predicted without one.

    cs336 fit --gpu 24GiB
    cs336 fit --gpu 4090 --precision bf16 --attention sdpa --checkpoint_blocks 1
    cs336 fit --gpu h200 --size 2.7B --fast on --precision bf16 --attention auto --train_tokens 300B --price 2.5/h
    cs336 fit --gpu 4090,h100,24GiB --d_model 2048 --num_layers 24 --num_heads 16 --d_ff 5504 --fast on --precision bf16
    """
    from cs336_systems.predict.fit import fit_tables

    print("\n\n".join(found.render(arguments.format) for found in fit_tables(arguments)))


def optimize(arguments: OptimizeArguments) -> None:
    """Find the fastest way to run a step on a GPU within its memory: micro batches, recomputation, offloading; what
    each choice costs or gives, and the command. Predicted without a GPU; where there is one, the best three are
    measured.

    cs336 optimize --size 2.7B --context_length 2048 --gpu h200 --tokens_per_step 131072
    cs336 optimize --size qwen2.5/7B --context_length 1024 --gpu h100 --memory 60GiB --allow bf16_state
    """
    from cs336_systems.experiments.steps.optimize_command import optimize as find_fastest

    find_fastest(arguments)


def plan(arguments: PlanArguments) -> None:
    """Predict memory and communication of parallel layouts, from one GPU to thousands, and recommend one.

    cs336 plan --size 2.7B --gpus 16 --gpu a100 --context_length 2048
    cs336 plan --size 2.7B --gpus 8 --gpu h200 --fast on --train_tokens 300B --price 2.5/h
    cs336 plan --size xxl --gpus 1024 --gpu h100 --strategy zero3,tp8,zero3+tp8 --context_length 8192
    """
    from cs336_systems.experiments.ranks.layout_times import missing_times, predicted_times
    from cs336_systems.experiments.ranks.layouts import PARALLEL_PLAN
    from cs336_systems.experiments.ranks.plan_cells import planned
    from cs336_systems.experiments.ranks.recommended_layout import command, recommendation, step_size

    cost, cell = arguments.cost(), planned(arguments)
    tables = [*PARALLEL_PLAN.tables([cell]), *predicted_times(cell, cost)]
    shown = [found.render(arguments.format) for found in tables]
    said = (recommendation(cell, cost), command(cell), step_size(cell), missing_times(cell, cost))
    advice = "\n".join(text.en for text in said if text is not None)
    if arguments.format in ("terminal", "md"):
        print("\n\n".join([*shown, advice]))
    else:
        print("\n\n".join(shown))
        print(advice, file=sys.stderr)


def rehearse(arguments: RehearseArguments) -> None:
    """Run the training step of one rank of a device mesh on one GPU, or trace it on none; nothing is sent.

    cs336 rehearse --gpus 1024 --dp_shard 128 --tp 8 --rank 17 --size 2.7B --context_length 2048 --checkpoint_blocks 1
    cs336 rehearse --gpus 64 --dp_replicate 4 --dp_shard 16 --size small --trace
    """
    from cs336_systems.experiments.ranks.rehearsal_command import rehearsal_tables

    print("\n\n".join(found.render(arguments.format) for found in rehearsal_tables(arguments)))


def tokenize(arguments: TokenizeArguments) -> int:
    """Turn text files, JSON lines and files of tokens into a folder of tokens for `cs336 train --data`; the same
    command continues a run that was stopped.

    cs336 tokenize stories.txt --train_tokenizer 8000 --output data/stories
    cs336 tokenize web/*.jsonl.gz --tokenizer Qwen3/tokenizer.json --text_field content --output data/web
    """
    from cs336_systems.train.tokens.tokenizing import tokenize as write_store

    return write_store(arguments)


def train(settings: TrainSettings) -> int:
    """Train a language model on a file; goes on where it was when it is called again. Under torchrun on many ranks.

    cs336 train --data README.md --steps 200 --output runs/readme
    cs336 train --data data/web --init weights/qwen3 --context_length 1024 --output runs/tuned
    torchrun --nproc_per_node 2 -m cs336_systems train --data README.md --parallel fsdp --device cpu
    """
    from cs336_systems.train.loop import train as run_training

    return run_training(settings)


def launch(arguments: LaunchArguments) -> None:
    """Print a script that starts `cs336 train` on a cluster: requeued before its time limit, resumed by itself.

    cs336 launch --slurm --nodes 4 --time 24:00:00 -o train.sbatch -- train --data README.md --batch_size 64
    cs336 launch --kubernetes --image me/cs336 --volume claim -- train --data README.md --output /shared/runs/mine
    cs336 launch --skypilot --gpu H200 -- train --data README.md --precision bf16
    """
    from cs336_systems.train.cluster.job import checked, next_steps
    from cs336_systems.train.cluster.manifests import kubernetes, skypilot
    from cs336_systems.train.cluster.slurm import script

    job = checked(arguments)
    text = {"slurm": script, "kubernetes": kubernetes, "skypilot": skypilot}[job.cluster](job)
    _write_text(text.rstrip("\n"), arguments.output)
    for remark in (*job.remarks, *next_steps(job)):
        print(f"cs336 launch: {one_line(remark)}", file=sys.stderr)


@dataclass(frozen=True)
class ExportArguments:
    run: str = flag(
        MISSING,
        "folder of a run of cs336 train, or of one checkpoint; for --format hf also of cs336 import",
        positional=True,
        metavar="RUN",
    )
    file: str = flag(
        MISSING,
        "file to write, such as weights.safetensors; with --format hf a folder",
        positional=True,
        metavar="FILE",
    )
    format: str = flag("safetensors", "our names in one file, or a folder as Hugging Face's", ("safetensors", "hf"))
    step: int | None = flag(None, "export the checkpoint of this step (default: the newest)")
    dtype: str | None = flag(None, "element type (default: fp32, or that of a file)", ("fp32", "bf16", "fp16"))
    like: str | None = flag(
        None, "--format hf: folder whose tokenizer and other settings are copied; also of cs336 tokenize"
    )
    force: bool = flag(False, "overwrite the file; --format hf overwrites no folder")


def export(arguments: ExportArguments) -> None:
    """Write the weights of a training run as a safetensors file; no GPU and no training data needed.

    cs336 export runs/readme weights.safetensors
    cs336 export runs/readme weights.safetensors --step 100 --dtype bf16
    cs336 export runs/tuned tuned --format hf --like Qwen3-0.6B --dtype bf16
    """
    from cs336_systems.train.weight_files import require_source

    run, file = Path(arguments.run), Path(arguments.file)
    require_source(run, may_be_file=arguments.format == "hf")  # before the seconds that torch takes to start
    if arguments.format == "hf":
        from cs336_systems.train.hf.hf_export import export_hf

        if arguments.force:
            way_out = "leave it out, and remove the folder or name one that does not exist"
            raise UserError(f"--force overwrites a file, and --format hf writes a folder; {way_out}")
        like = None if arguments.like is None else Path(arguments.like)
        print(export_hf(run, file, step=arguments.step, dtype=arguments.dtype, like=like))
        return
    from cs336_systems.train.weights import export as write_weights

    if arguments.like is not None:
        raise UserError("--like needs --format hf")
    print(write_weights(run, file, step=arguments.step, dtype=arguments.dtype or "fp32", force=arguments.force))


@dataclass(frozen=True)
class ImportArguments:
    folder: str = flag(MISSING, "folder with config.json and model.safetensors", positional=True, metavar="FOLDER")
    output: str = flag(MISSING, "folder to write, such as weights/qwen3", positional=True, metavar="OUTPUT")


def import_model(arguments: ImportArguments) -> None:
    """Read a published Llama 3, Qwen 2.5 or Qwen 3 in the format of Hugging Face, to train it further with --init.

    cs336 import Qwen3-0.6B weights/qwen3
    """
    from cs336_systems.train.weight_files import require_published, tokenizer_of_weights

    require_published(Path(arguments.folder))  # before the seconds that torch takes to start
    from cs336_systems.train.hf.hf_folders import import_folder

    model = import_folder(Path(arguments.folder), Path(arguments.output))
    print(f"{arguments.output}: {model.parameters:,} weights")
    if tokenizer := tokenizer_of_weights(Path(arguments.output)):
        print(f"tokenize with: cs336 tokenize TEXT --tokenizer {shlex.quote(str(tokenizer))} --output data/tokens")
    else:
        own = f"no tokenizer.json in {arguments.folder!r}: get the model's own ({model.vocab_size:,} tokens at most)"
        print(f"{own}, then tokenize with: cs336 tokenize TEXT --tokenizer tokenizer.json --output data/tokens")
    flags = f"--init {shlex.quote(arguments.output)} --learning_rate 2e-5 --output runs/tuned"
    print(f"train it with: cs336 train --data data/tokens {flags}")


@dataclass(frozen=True)
class TableArguments:
    files: tuple[str, ...] = flag((), "files of records, or folders that hold one", positional=True, metavar="PATH")
    format: str = flag("terminal", "output format", FORMATS)
    experiments: tuple[str, ...] = flag((), "only these experiments")
    output: str | None = flag(None, "write here instead of to the screen")


def table(arguments: TableArguments) -> None:
    """Records as tables.

    cs336 table runs/quick/records.jsonl --format md
    """
    from cs336_systems.record import chosen, load
    from cs336_systems.report.sections import tables

    if not arguments.files:
        raise UserError("name a file of records, such as runs/quick/records.jsonl")
    loaded = [load(name) for name in arguments.files]
    for remark in (remark for one in loaded for remark in one.remarks):
        print(one_line(remark.en), file=sys.stderr)
    records = chosen([record for one in loaded for record in one.records], arguments.experiments)
    if not records:
        raise UserError(f"no records in {', '.join(arguments.files)}; measure some with: cs336 bench")
    text = "\n\n".join(found.render(arguments.format) for found in tables(records, catalogue()))
    _write_text(text, arguments.output)


def _write_text(text: str, output: str | None) -> None:
    """Write a text to a file, or to the screen."""
    if output is None:
        print(text)
        return
    try:
        write_file(Path(output), text + "\n")
    except OSError as error:
        raise write_failure(error, output) from None


@dataclass(frozen=True)
class ReportArguments:
    paths: tuple[str, ...] = flag((), "files of records, or folders that hold one", positional=True, metavar="PATH")
    output: str = flag("report", "folder to write to", short="-o")
    formats: tuple[str, ...] = flag((), "besides the page: md (with pictures), csv, latex, typst")
    lang: str = flag("en", "language; the page can be switched", ("en", "zh"))
    title: str = flag("", "heading of the report", may_be_empty=True)
    published: bool = flag(False, "beside the same work: what write-ups of the course give for other GPUs")


def report(arguments: ReportArguments) -> None:
    """Records as a write-up: one page that opens anywhere, and tables for papers. Several machines side by side.

    cs336 report runs/quick -o report
    cs336 report results/h200/records.jsonl --formats md,csv,latex,typst --lang zh -o report
    cs336 report results/h200 runs/quick --published -o report
    """
    from cs336_systems.report.build import write_report

    language: Any = arguments.lang  # one of its choices
    written = write_report(
        arguments.paths,
        Path(arguments.output),
        catalogue(),
        title=arguments.title,
        language=language,
        formats=arguments.formats,
        with_published=arguments.published,
    )
    if written.left_out:
        print(f"left out, pages without records: {', '.join(map(one_line, written.left_out))}", file=sys.stderr)
    for line in written.summary:
        print(one_line(line.in_(language)))
    for path in reversed(written.files):  # the page last, where it is seen
        print(path)


@dataclass(frozen=True)
class CompareArguments:
    a: str = flag(MISSING, "file of records, or folder that holds one: before", positional=True, metavar="A")
    b: str = flag(MISSING, "file of records, or folder that holds one: after", positional=True, metavar="B")
    metric: tuple[str, ...] = flag((), "what to compare, such as step_time,peak_memory (default: the time of a step)")
    experiments: tuple[str, ...] = flag((), "only these experiments")
    fail_if_slower: str | None = flag(
        None, "exit code 1 if some row of B is slower by more than this, such as 5%%, with its whole interval"
    )
    different_work: bool = flag(False, "pair cells that agree only in size, context, batch, mode and precision")
    confidence: float = flag(0.95, "of the intervals and verdicts")
    format: str = flag("terminal", "output format", FORMATS)
    output: str | None = flag(None, "folder to write a page to, with a forest plot and the table", short="-o")


def compare(arguments: CompareArguments) -> int:
    """Two files of records: for each cell in both, how much slower or faster B is, and whether that is more than noise.
    The largest changes come first, what is undecided last, the geometric mean at the end.

    cs336 compare before/records.jsonl after/records.jsonl
    cs336 compare before/records.jsonl after/records.jsonl --fail_if_slower 5%
    cs336 compare before/records.jsonl after/records.jsonl --output comparison
    """
    from cs336_systems.record import load
    from cs336_systems.report.build import write
    from cs336_systems.report.compare import compare as compare_records
    from cs336_systems.report.compare import parse_percent
    from cs336_systems.report.compare_output import document, on_screen, table

    limit = None if arguments.fail_if_slower is None else parse_percent(arguments.fail_if_slower)
    a, b = load(arguments.a), load(arguments.b)
    found = compare_records(
        a.records,
        b.records,
        files=(arguments.a, arguments.b),
        metrics=arguments.metric,
        experiments=arguments.experiments,
        confidence=arguments.confidence,
        different_work=arguments.different_work,
    )
    slower = [] if limit is None else found.slower_by(limit)
    whole = table(found)
    print(on_screen(found, sys.stdout) if arguments.format == "terminal" else whole.render(arguments.format))
    notes = whole.notes if arguments.format == "csv" else ()  # CSV has no place for them
    aside = [text.en for text in (*a.remarks, *b.remarks, *notes)]
    if arguments.output is not None:
        (page,) = write(document(found), Path(arguments.output))
        aside.append(f"open in a browser: {page}")
    if limit is not None and found.untold:
        aside.append(f"--fail_if_slower cannot tell in {len(found.untold)} of {len(found.timed)} rows")
    if slower:
        names = ", ".join(row.title for row in slower[:5])
        rule = f"the lower end of the {arguments.confidence * 100:g}% interval counts"
        rows = f"{len(slower)} of {len(found.timed)} rows"
        aside.append(f"{rows} slower by more than {limit:g}% ({rule}), such as: {names}")
    for line in aside:
        print(one_line(line), file=sys.stderr)
    return 1 if slower else 0


@dataclass(frozen=True)
class TuneArguments:
    head_dims: tuple[int, ...] = flag((64, 128), "head dims to tune for")
    precisions: tuple[str, ...] = flag(("bf16",), "element types: bf16, fp16, fp32")
    seconds: float = flag(120.0, "stop after this long; what was found by then is kept")
    format: str = flag("terminal", "table format", FORMATS)


def tune(arguments: TuneArguments) -> None:
    """Find the fastest tiles of the Triton attention kernels for this GPU, and keep them for later runs.

    cs336 tune --head_dims 64,128 --seconds 120
    """
    from cs336_systems.experiments.attention.tune import tune as search

    print(search(arguments.head_dims, arguments.precisions, arguments.seconds).render(arguments.format))


@dataclass(frozen=True)
class CalibrateArguments:
    output: str | None = flag(None, f"{OUTPUT}; cells it already holds are not run again (default: under runs/)")
    force: bool = flag(False, "run cells again that the file already holds")
    format: str = flag("terminal", "table format", FORMATS)


def calibrate(arguments: CalibrateArguments) -> None:
    """Time the kernels of training steps on this GPU, and keep their rates: predictions of a step's time use them.

    cs336 calibrate
    cs336 calibrate --output runs/calibrate/records.jsonl
    """
    from cs336_systems import record
    from cs336_systems.experiments.kernels.kernel_rates import calibrate as measure
    from cs336_systems.experiments.session import new_run_file

    path = record.output_file(arguments.output) if arguments.output else new_run_file("calibrate")
    print(measure(path, force=arguments.force).render(arguments.format))


@dataclass(frozen=True)
class DoctorArguments:
    ranks: bool = flag(False, "check the ranks that torchrun has started; without torchrun, start some here")
    local_ranks: int | None = flag(None, "ranks to start without torchrun (default: one for each GPU, at least 2)")
    output: str | None = flag(None, "folder that all ranks must share")
    device: str | None = flag(None, "cpu or cuda (default: cuda where there is one)", ("cpu", "cuda"))
    rank_timeout: float = flag(120.0, "seconds to wait for a rank that does not respond")
    format: str = flag("terminal", "table format", FORMATS)


def doctor(arguments: DoctorArguments) -> int:
    """Show what this machine has, what is missing, and how to fix it; with --ranks, check a started group of ranks:
    versions that differ, the shared folder, clocks, the speed of every rank and link. Exit code 1 if a rank differs.

    cs336 doctor
    cs336 doctor --ranks --local_ranks 2 --device cpu
    torchrun --nproc_per_node 8 -m cs336_systems doctor --ranks --output runs
    """
    from cs336_systems.measure.doctor import examine

    if arguments.ranks:
        return _doctor_of_ranks(arguments)
    for name in ("local_ranks", "output", "device"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} needs --ranks")
    _print_findings(examine())
    return 0


def _doctor_of_ranks(arguments: DoctorArguments) -> int:
    from cs336_systems.parallel.launch import RankError
    from cs336_systems.train.rank_doctor import check_ranks

    if arguments.local_ranks is not None and arguments.local_ranks < 1:
        raise UserError(f"--local_ranks must be at least 1, got {arguments.local_ranks}")
    if not arguments.rank_timeout >= 1:
        raise UserError(f"--rank_timeout must be at least 1, got {arguments.rank_timeout}")
    try:
        report = check_ranks(arguments.output, arguments.device, arguments.local_ranks, arguments.rank_timeout)
    except RankError as error:
        print(f"cs336 doctor: {error}", file=sys.stderr)
        return 1
    if report is None:
        return 0
    for found in report.tables():
        print(found.render(arguments.format), end="\n\n")
    findings = report.findings()
    _print_findings(findings)
    return 1 if any(finding.mark == "bad" for finding in findings) else 0


def _print_findings(findings: Sequence["Finding"]) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(
            f"{finding.mark:4} {finding.what:{width}}  {finding.seen}" + (f"  -> {finding.fix}" if finding.fix else "")
        )


SHELLS = ("bash", "zsh")


@dataclass(frozen=True)
class CompletionArguments:
    name: str | None = flag(None, "bash (default) or zsh", SHELLS, positional=True)
    shell: str | None = flag(None, "the shell to complete in", SHELLS, excludes=("name",))


def completion(arguments: CompletionArguments) -> None:
    """A completion script for your shell:  source <(cs336 completion bash)"""
    if "zsh" in (arguments.name, arguments.shell):
        print("autoload -U +X bashcompinit && bashcompinit")
    flags = {
        name: " ".join(
            f"--{found.name}" for found in flags_of(command.arguments) if not found.spec.metadata.get("positional")
        )
        for name, command in COMMANDS.items()
    }
    flags["completion"] += f" {' '.join(SHELLS)}"
    cases = "\n".join(f'    {name}) words="{words}" ;;' for name, words in flags.items())
    print(
        f'_cs336() {{\n  local words="{" ".join(COMMANDS)}"\n  case "${{COMP_WORDS[1]}}" in\n{cases}\n  esac\n'
        f'  [ "$COMP_CWORD" -eq 1 ] && words="{" ".join(COMMANDS)}"\n'
        f'  [ "${{COMP_WORDS[1]}}" = run ] && words="$words {" ".join([*runnable(), ALL])}"\n'
        f'  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))\n}}\n'
        "complete -o default -F _cs336 cs336"
    )


def _run_manual() -> str:
    one, *others = runnable()
    return (
        f"{run.__doc__}\n\ncs336 run {one} {others[1]} --preset quick\n"
        f"cs336 run {' '.join([one, *others[:4]])} --preset course --output runs/h200/records.jsonl\n"
        f"cs336 run {ALL} --preset {HANDOUT_2026}"
    )


@dataclass(frozen=True)
class Command:
    summary: str
    arguments: type
    function: Callable[[Any], int | None]
    manual: str | None = None


COMMANDS = {
    "bench": Command("time and memory of one configuration, or a sweep", BenchArguments, bench, bench_manual),
    "run": Command("named experiments, with presets; resumes", RunArguments, run, _run_manual()),
    "profile": Command("kernels and memory of a step: tables, traces, a timeline", ProfileArguments, profile),
    "inspect": Command("a trace or a memory snapshot recorded elsewhere", InspectArguments, inspect),
    "memory": Command("what a step needs, part by part, without a GPU", MemoryArguments, memory),
    "fit": Command("what fits on a given GPU", FitArguments, fit),
    "optimize": Command("the fastest way to run a step within a GPU's memory", OptimizeArguments, optimize),
    "plan": Command("memory and communication of a parallel layout, one GPU to thousands", PlanArguments, plan),
    "rehearse": Command("the step of one rank of a large mesh, on one GPU or traced", RehearseArguments, rehearse),
    "tokenize": Command("documents as tokens to train on; resumes", TokenizeArguments, tokenize),
    "train": Command("train a language model; resumes, survives faults", TrainSettings, train),
    "launch": Command("a script that starts train on Slurm, Kubernetes or SkyPilot", LaunchArguments, launch),
    "export": Command("weights of a training run as a safetensors file", ExportArguments, export),
    "import": Command("a published Llama or Qwen as weights to start from", ImportArguments, import_model),
    "table": Command("records as terminal, Markdown, CSV, LaTeX or Typst tables", TableArguments, table),
    "report": Command("records as a page, Markdown, CSV, LaTeX, Typst; English or Chinese", ReportArguments, report),
    "compare": Command("two files of records: what is faster or slower, beyond noise", CompareArguments, compare),
    "calibrate": Command("this GPU's rates, for predictions of time; resumes", CalibrateArguments, calibrate),
    "tune": Command("tile choices of the attention kernels for this GPU", TuneArguments, tune),
    "doctor": Command("what this machine has, what is missing, how to fix it", DoctorArguments, doctor),
    "completion": Command("shell completion", CompletionArguments, completion),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="cs336",
        description=__import__("cs336_systems").__doc__,
        epilog="start here:\n  cs336 doctor\n  cs336 bench\n  cs336 fit --gpu 24GiB\n"
        f"  cs336 run {runnable()[0]} --preset quick\n\nexperiments of `run`:\n"
        + "\n".join(f"  {name:18} {catalogue()[name].question.en}" for name in runnable()),
    )
    parser.add_argument("--version", action="version", version=f"cs336_systems {__version__}")
    words = sys.argv[1:] if argv is None else argv
    named = next((word for word in words if word in COMMANDS), None)
    other = Parser()

    def parser_of(*, prog: str, **options: Any) -> Parser:
        """Return the parser with the flags of the named command; other commands are listed by name only."""
        return Parser(prog=prog, **options) if prog == f"cs336 {named}" else other

    subparsers = parser.add_subparsers(
        dest="command", metavar="command", required=True, parser_class=cast(type[Parser], parser_of)
    )
    for name, command in COMMANDS.items():
        manual = command.manual or command.function.__doc__
        subparser = subparsers.add_parser(name, help=command.summary, description=cleandoc(manual or ""))
        if name == named:  # the flags of all take longer than many commands
            add_flags(subparser, command.arguments)
    mistakes: list[str] = []

    def run_command() -> int | None:
        try:
            namespace = parser.parse_args(words)
            command = COMMANDS[namespace.command]
            arguments = read_flags(command.arguments, namespace)
        except (UserError, SystemExit) as error:
            mistakes.extend([flags_named(error)] if isinstance(error, UserError) else getattr(error, "__notes__", ()))
            raise
        return command.function(arguments)

    try:
        return guarded(f"cs336 {named}" if named else "cs336", run_command, ["cs336", *words])
    finally:
        if mistakes and named in ("train", "doctor") and "TORCHELASTIC_RUN_ID" in os.environ:
            _tell_other_ranks(mistakes[0])


def _tell_other_ranks(mistake: str) -> None:
    """Tell the other torchrun ranks, whose command lines may differ, why this rank does not join them."""
    from cs336_systems.parallel.rendezvous import tell_failure

    tell_failure(mistake)


if __name__ == "__main__":
    sys.exit(main())
