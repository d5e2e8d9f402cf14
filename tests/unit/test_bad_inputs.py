"""Bad and odd inputs of every command: the exit code, one line that names the value, no traceback, no hang.

A line is a command as a user would type it, in a folder with the files of `prepare`. Almost all run in this process.
"""

import gzip
import os
import pickle
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import record
from cs336_systems.benchmark.benchmark import main as benchmark
from cs336_systems.benchmark.calculate_memory import main as calculate_memory
from cs336_systems.cli import main
from cs336_systems.config import RunConfig
from cs336_systems.experiments import runner as runner_module
from cs336_systems.record import CELL_TIME, Environment, Record
from tests.helpers import CPU_ONLY, CS336, PACKAGE, clean_env

LIMIT = 120
"""Seconds after which an input counts as a hang."""

REFUSED = {
    "the command itself": """
        bnch                                        | did you mean 'bench'?
        Bench                                       | did you mean 'bench'?
        --nonsense                                  | required: command
        --size tiny                                 | 'tiny'
        help                                        | 'help'
        ☃                                           | '☃'
    """,
    "bench": """
        bench --presision bf16                      | did you mean '--precision'?
        bench --context-lenght 8                    | did you mean '--context-length'?
        bench -size tiny                            | did you mean '--size'?
        bench tiny                                  | unrecognized arguments: tiny
        bench --size                                | --size: expected one argument
        bench --size=                               | --size: the value is empty
        bench --size ''                             | --size: the value is empty
        bench --size ' '                            | unknown --size ' '
        bench --size smal                           | did you mean 'small'?
        bench --size 小                             | unknown --size '小'
        bench --size tiny --sizes small             | --sizes and --size exclude each other
        bench --sizes ,                             | ',' names nothing
        bench --sizes tiny --sizes small            | write one list: --sizes tiny,small
        bench --sizes tiny,smal                     | did you mean 'small'?
        bench --forward_only --mode train-step      | --forward_only and --mode exclude each other
        bench --forward_only --modes forward        | --forward_only and --modes exclude each other
        bench --mode Forward                        | did you mean 'forward'?
        bench --mode train_step                     | did you mean 'train-step'?
        bench --modes forward,trainstep             | did you mean 'train-step'?
        bench --mode forward --modes forward        | --modes and --mode exclude each other
        bench --precision fp8                       | needs the kernels of the fast step, got --fast off
        bench --precision fp4                       | 'fp4'
        bench --precision bf16 --precisions bf16    | --precisions and --precision exclude each other
        bench --precisions bf61                     | did you mean 'bf16'?
        bench --attention flash                     | 'flash'
        bench --attentions sdqa                     | did you mean 'sdpa'?
        bench --attention sdpa --attentions sdpa    | --attentions and --attention exclude each other
        bench --context_length 0                    | --context_length must be a whole number of at least 1, got 0
        bench --context_length -5                   | got -5
        bench --context_length 1e3                  | '1e3'
        bench --context_length 12.5                 | '12.5'
        bench --context_length 99999999999999999999 | --context_length must be at most 2147483647
        bench --context_lengths 8,,x                | '8,,x'
        bench --context_lengths 8,0                 | got 0
        bench --context_lengths 8 --context_length 8| exclude each other
        bench --batch_size 0                        | --batch_size must be
        bench --batch_size nan                      | 'nan'
        bench --batch_size 1000000000000000000000   | --batch_size must be at most
        bench --num_layers 1000000                  | --num_layers must be at most 10000
        bench --vocab_size -1                       | --vocab_size must be
        bench --d_ff 0                              | --d_ff must be
        bench --d_model 17                          | --d_model 17 is not divisible by --num_heads 12
        bench --num_heads 0                         | --num_heads must be
        bench --d_model 6 --num_heads 2             | 6 / 2 = 3 is odd
        bench --rope_theta inf                      | --rope_theta must be a finite number above 0, got inf
        bench --rope_theta nan                      | got nan
        bench --rope_theta 0                        | got 0.0
        bench --max_grad_norm nan                   | --max_grad_norm must be
        bench --max_grad_norm -1                    | got -1.0
        bench --warmup_steps -1                     | --warmup_steps must be
        bench --num_steps 0                         | --num_steps must be
        bench --num_steps many                      | 'many'
        bench --seed x                              | 'x'
        bench --seed 99999999999999999999           | --seed must be a 64-bit number
        bench --device gpu                          | unknown --device 'gpu'; use cpu, cuda or cuda:N
        bench --device ''                           | --device: the value is empty
        bench --device cuda:x                       | 'cuda:x'
        bench --device cuda:99999999999999          | 'cuda:99999999999999'
        bench --device CPU                          | 'CPU'
        bench --timeout 0                           | --timeout must be above 0
        bench --timeout -1                          | got -1.0
        bench --timeout nan                         | got nan
        bench --timeout inf                         | got inf
        bench --peak_tflops 0                       | --peak_tflops must be above 0
        bench --output taken                        | 'taken/records.jsonl' is a folder; name a file
        bench --output ''                           | --output: the value is empty
        bench --output good.jsonl/x                 | cannot write to
        bench --output binary.jsonl                 | not a record of cs336_systems
        bench --output other.jsonl                  | is this the right file?
        bench --output fifo.jsonl                   | not a regular file
        bench --output /dev/null                    | not a regular file
        bench --output newer.jsonl                  | schema version 99
        bench --fast quick                          | --fast 'quick'
        bench --fast kernel                         | did you mean 'kernels'?
        bench --fast on,off                         | on and off cannot be combined
        bench --fast graph                          | --fast graph: needs a CUDA GPU
        bench --fast optimizer --mode forward       | needs --mode train-step, not forward
        bench --fast optimizer --precision fp16     | use --precision bf16
        bench --fast kernels --compile              | cannot be combined with --compile
        bench --fast kernels --model a:b            | not --model
        bench --model x                             | --model 'x' is not of the form package.module:factory
        bench --model a.b:c:d                       | 'a.b:c:d'
        bench --model ''                            | --model: the value is empty
        bench --model a:b --attention sdpa          | --model and --attention exclude each other
        bench --model a:b --checkpoint_blocks 1     | --model and --checkpoint_blocks exclude each other
        bench --compile=yes                         | 'yes'
        bench --checkpoint_blocks -1                | --checkpoint_blocks must be
        bench --unknown 1 --other 2                 | --unknown 1 --other 2
    """,
    "run": """
        run                                         | name at least one experiment
        run ''                                      | the value is empty
        run nope                                    | unknown experiment 'nope'
        run end_to_en                               | did you mean 'end_to_end'?
        run end_to_end nope                         | 'nope'
        run end_to_end,warmup                       | 'end_to_end,warmup'
        run --preset quick                          | name at least one experiment
        run end_to_end --preset slow                | 'slow'
        run end_to_end --preset ''                  | --preset: the value is empty
        run end_to_end --num_steps -1               | --num_steps must be
        run end_to_end --device tpu                 | 'tpu'
        run end_to_end --output taken               | 'taken/records.jsonl' is a folder
        run end_to_end --timeout 1e300              | --timeout must be
    """,
    "profile": """
        profile --only nothing                      | --only 'nothing'
        profile --only memroy                       | did you mean 'memory'?
        profile --only ''                           | names nothing
        profile --only memory --nsys                | --nsys records kernels
        profile --peak_tflops 100                   | --peak_tflops is for MFU
        profile --mode none                         | 'none'
        profile --num_steps 0                       | --num_steps must be
        profile --compile --fast kernels            | cannot be combined with --compile
        profile --device gpu                        | 'gpu'
        profile --output good.jsonl/x               | cannot write to
        profile --output /dev/null                  | not a regular file
        profile --model a:b --attention sdpa        | exclude each other
    """,
    "inspect": """
        inspect                                     | name a trace
        inspect ''                                  | the value is empty
        inspect nope.json                           | 'nope.json': No such file
        inspect nope.sqlite                         | no such file
        inspect nope.pickle                         | 'nope.pickle': No such file
        inspect folder                              | traces end in .json
        inspect folder.json                         | it is a folder
        inspect empty.json                          | 'empty.json' is not a trace
        inspect empty.pickle                        | 'empty.pickle' is not a memory snapshot
        inspect empty.sqlite                        | 'empty.sqlite' is empty
        inspect binary.json                         | 'binary.json' is not a trace
        inspect binary.pickle                       | 'binary.pickle' is not a memory snapshot
        inspect binary.sqlite                       | 'binary.sqlite' is not an export of nsys
        inspect other.sqlite                        | was not made by nsys
        inspect notebook.json                       | it has no list of traceEvents
        inspect list.json                           | it has no list of traceEvents
        inspect noevents.json                       | holds no kernels
        inspect badevents.json                      | it has no list of traceEvents
        inspect brackets.json                       | 'brackets.json' is not a trace of torch.profiler, or is cut off:
        inspect deep.json                           | 'deep.json' is not a trace
        inspect cut.json.gz                         | 'cut.json.gz' is cut off
        inspect words.pickle                        | it has no segments
        inspect evil.pickle                         | it names os.system
        inspect fifo.json                           | a pipe that nothing is written to
        inspect fifo.sqlite                         | it is a pipe
        inspect data.csv                            | 'data.csv': traces end in
        inspect noevents.json --format html         | 'html'
        inspect nope.json --what_if attention       | 'attention' is not of the form
        inspect nope.json --what_if attention=-0.5  | '-0.5' is neither a factor
        inspect nope.json --what_if host=2ms        | give a factor
        inspect nope.json --what_if ''              | the value is empty
        inspect nope.json --what_if matmul=2/3      | a number of kernels belongs to a time
        inspect nope.json --what_if matmul=2ms/0    | '0' is not a number of kernels
        inspect nope.json --step_time 75ms          | belongs to --what_if
        inspect nope.json --what_if host=0 --step_time 75 | '75' is not a time above 0
        inspect nope.json --what_if host=0 --step_time '' | the value is empty
        inspect nope.json --power_limited           | belongs to --what_if
        inspect empty.pickle --critical_path        | is a memory snapshot
        inspect good.jsonl --critical_path          | --critical_path and --what_if need a trace
        inspect good.jsonl --what_if attention=0.8  | 'good.jsonl' is a file of records
        inspect noevents.json --what_if matmul=2    | holds no kernels
    """,
    "memory": """
        memory --size nope                          | unknown --size 'nope'
        memory --size ''                            | the value is empty
        memory --num_layers 0                       | --num_layers must be
        memory --num_layers 1000000                 | --num_layers must be at most 10000
        memory --num_layers 99999999999999999999999 | --num_layers must be at most
        memory --context_length 10000000000000      | --context_length must be at most
        memory --vocab_size ten                     | 'ten'
        memory --d_model 100 --num_heads 7          | --d_model 100 is not divisible by --num_heads 7
        memory --format pdf                         | 'pdf'
        memory --precision int8                     | 'int8'
        memory --model nope                         | package.module:factory
        memory --model a:b --attention sdpa         | exclude each other
        memory --rope_theta -1                      | --rope_theta must be
        memory extra                                | unrecognized arguments: extra
    """,
    "fit": """
        fit --gpu -5GiB                             | unknown --gpu '-5GiB'; give its memory
        fit --batch_size -1                         | --batch_size must be at least 0 (0: the largest that fits), got -1
        fit --context_length 4k                     | '4k' may be 4000 or 4096; write the whole number
        fit --gpu abacus                            | 'abacus'
        fit --gpu 0GiB                              | '0GiB'
        fit --gpu -5                                | '-5'
        fit --gpu nan                               | 'nan'
        fit --gpu ''                                | --gpu: the value is empty
        fit --gpu 99999GiB                          | '99999GiB'
        fit --sizes nope                            | 'nope'
        fit --sizes ''                              | names nothing
        fit --context_lengths 0                     | --context_length must be
        fit --mode sideways                         | 'sideways'
        fit --precision fp64                        | 'fp64'
        fit --checkpoint_blocks -1                  | --checkpoint_blocks must be
    """,
    "plan": """
        plan --gpus 0                               | --gpus must be at least 1
        plan --gpus -1                              | got -1
        plan --gpus many                            | 'many'
        plan --gpu abacus                           | 'abacus'
        plan --strategy nope                        | 'nope'
        plan --strategy ''                          | names nothing
        plan --strategy tp0                         | 'tp0'
        plan --strategy zero3+                      | 'zero3+'
        plan --node 0                               | --node must be at least 1
        plan --tflops nan                           | --tflops must be
        plan --link -1                              | --link must be
        plan --network inf                          | --network must be
        plan --count nothing                        | 'nothing'
        plan --size nope                            | 'nope'
        plan --context_length 0                     | --context_length must be
        plan --format docx                          | 'docx'
    """,
    "train": """
        train                                       | name a file to train on
        train text.txt                              | unrecognized arguments: text.txt
        train --dta text.txt                        | did you mean '--data'?
        train --data nope.txt                       | no file 'nope.txt'
        train --data ''                             | --data: the value is empty
        train --data folder                         | cs336 tokenize folder --train_tokenizer 8000 --output
        train --data unfinished                     | 'unfinished' is unfinished
        train --data text.txt --lr 1e-3             | did you mean '--learning_rate'?
        train --data text.txt --seq-len 64          | did you mean '--context_length'?
        train --tokens text.txt                     | did you mean '--data'?
        train --data text.txt --resume              | the same command resumes by itself; '--resume_from'
        bench --max_steps 5                         | did you mean '--num_steps'?
        bench --lr 5                                | unrecognized arguments: --lr 5; see
        train --data fifo.txt                       | 'fifo.txt' is not a regular file
        train --data empty.txt                      | 'empty.txt' holds no tokens
        train --data short.txt                      | too few for one training sequence
        train --data empty.npy                      | 'empty.npy' holds no tokens
        train --data odd.bin                        | 'odd.bin' holds no tokens
        train --data text.txt --steps 0             | --steps must be at least 1
        train --data text.txt --steps -1            | got -1
        train --data text.txt --steps 9 --warmup_steps 9   | --warmup_steps must be below --steps, 9
        train --data text.txt --batch_size 1000000000000 | the tokens of a step alone need
        train --data text.txt --num_layers 9000 --d_model 65536 --num_heads 8 --steps 1 | (predicted, not tried)
        train --data text.txt --warmup_steps -1     | --warmup_steps must be at least 0
        train --data text.txt --learning_rate 0     | --learning_rate must be a finite number above 0
        train --data text.txt --learning_rate nan   | got nan
        train --data text.txt --learning_rate inf   | got inf
        train --data text.txt --beta1 1             | --beta1 must be
        train --data text.txt --beta2 nan           | --beta2 must be
        train --data text.txt --final_share 2       | --final_share must be
        train --data text.txt --validation_share 0  | --validation_share must be
        train --data text.txt --validation_share nan| got nan
        train --data text.txt --batch_size 0        | --batch_size must be
        train --data text.txt --micro_batch_size 0  | --micro_batch_size must be
        train --data text.txt --batch_size 9 --micro_batch_size 4  | not a multiple of --micro_batch_size 4
        train --data text.txt --save_every 0        | --save_every must be
        train --data text.txt --keep 0              | --keep must be
        train --data text.txt --keep_every -1       | --keep_every must be
        train --data text.txt --log_every 0         | --log_every must be
        train --data text.txt --eval_every -1       | --eval_every must be
        train --data text.txt --eval_batches 0      | --eval_batches must be
        train --data text.txt --sample_tokens -1    | --sample_tokens must be
        train --data text.txt --rank_timeout inf    | --rank_timeout must be
        train --data text.txt --parallel zero       | 'zero'
        train --data text.txt --size nope           | 'nope'
        train --data text.txt --vocab_size 0        | --vocab_size must be
        train --data text.txt --vocab_size 10       | holds token 119, and the model has a vocabulary of 10 tokens
        train --data text.txt --context_length 99999| use a longer file
        train --data text.txt --attention flesh     | 'flesh'
        train --data text.txt --fast turbo          | 'turbo'
        train --data text.txt --fast graph          | needs a CUDA GPU
        train --data text.txt --device tpu          | 'tpu'
        train --data text.txt --device cuda         | use --device cpu
        train --data text.txt --output good.jsonl   | cannot write to 'good.jsonl'
        train --data text.txt --output linked       | .lock: it is a symbolic link
        train --data text.txt --output ''           | --output/-o: the value is empty
        train --data text.txt --max_grad_norm inf   | --max_grad_norm must be
        train --data text.txt --weight_decay nan    | --weight_decay must be
        train --data text.txt --most_skipped 0      | --most_skipped must be
        train --data text.txt --seed 99999999999999999999  | --seed must be a 64-bit number
    """,
    "table": """
        table                                       | name a file of records
        table ''                                    | the value is empty
        table nope.jsonl                            | no file 'nope.jsonl'; make one with
        table hollow                                | no file 'hollow/records.jsonl'
        table empty.jsonl                           | no records in empty.jsonl
        table binary.jsonl                          | binary.jsonl, line 1
        table list.jsonl                            | not a JSON object
        table null.jsonl                            | not a JSON object
        table other.jsonl                           | is this the right file?
        table newer.jsonl                           | upgrade it
        table utf16.jsonl                           | utf16.jsonl, line 1
        table data.csv                              | data.csv, line 1
        table fifo.jsonl                            | a pipe that nothing is written to
        table /dev/zero                             | it is a device
        table good.jsonl nope.jsonl                 | no file 'nope.jsonl'
        table good.jsonl/x                          | no file 'good.jsonl/x'
        table 'weird ☃ name'                        | --output 'weird ☃ name/records.jsonl'
        table good.jsonl --experiments nope         | no records of the experiment 'nope'; there are: bench
        table good.jsonl --experiments bnch         | did you mean 'bench'?
        table good.jsonl --experiments bench,nope   | 'nope'
        table good.jsonl --experiments ''           | names nothing
        table good.jsonl --format papyrus           | 'papyrus'
        table good.jsonl --format MD                | did you mean 'md'?
        table good.jsonl --output folder            | cannot write to 'folder'
        table good.jsonl --output nope/out.md       | No such file or directory
        table good.jsonl --output ''                | the value is empty
    """,
    "report": """
        report                                      | name a file of records
        report nope                                 | no file 'nope'
        report hollow                               | or cs336 train --data TEXT --output hollow
        report empty.jsonl                          | no records in empty.jsonl
        report binary.jsonl                         | binary.jsonl, line 1
        report other.jsonl                          | is this the right file?
        report fifo.jsonl                           | a pipe that nothing is written to
        report /dev/zero                            | it is a device
        report good.jsonl nope.jsonl                | no file 'nope.jsonl'
        report good.jsonl --formats pdf             | unknown format 'pdf'
        report good.jsonl --formats md,typts        | did you mean 'typst'?
        report good.jsonl --formats ''              | names nothing
        report good.jsonl --lang fr                 | 'fr'
        report good.jsonl -o                        | expected one argument
        report good.jsonl -o ''                     | the value is empty
        report good.jsonl -o good.jsonl             | cannot write to 'good.jsonl'
        report good.jsonl -o good.jsonl/x           | Not a directory
    """,
    "compare": """
        compare                                     | required: A, B
        compare good.jsonl                          | required: B
        compare good.jsonl good.jsonl good.jsonl    | unrecognized arguments
        compare good.jsonl nope.jsonl               | no file 'nope.jsonl'
        compare hollow good.jsonl                   | no file 'hollow/records.jsonl'
        compare good.jsonl empty.jsonl              | 'empty.jsonl' holds no records
        compare good.jsonl binary.jsonl             | binary.jsonl, line 1
        compare good.jsonl fifo.jsonl               | a pipe that nothing is written to
        compare good.jsonl good.jsonl --metric nope | nope; choose a --metric
        compare good.jsonl good.jsonl --metric ''   | names nothing
        compare good.jsonl good.jsonl --experiments nope        | has no experiment nope
        compare good.jsonl good.jsonl --experiments bench,nope  | has no experiment nope
        compare good.jsonl good.jsonl --confidence 95           | --confidence must be
        compare good.jsonl good.jsonl --confidence nan          | --confidence must be
        compare good.jsonl good.jsonl --fail_if_slower 0.05     | '0.05' is not a percentage
        compare good.jsonl good.jsonl --fail_if_slower five     | 'five' is not a percentage
        compare good.jsonl good.jsonl --fail_if_slower -5%      | '-5%' is not a percentage
        compare good.jsonl good.jsonl --format xml  | 'xml'
        compare train.jsonl tuned.jsonl             | training runs side by side: cs336 report A B
    """,
    "tune, doctor, completion": """
        tune                                        | tune needs a CUDA GPU
        tune --head_dims 0                          | --head_dims 0 is out of range
        tune --head_dims 100000                     | --head_dims 100000 is out of range
        tune --head_dims x                          | 'x'
        tune --head_dims ''                         | names nothing
        tune --precisions int4                      | 'int4'
        tune --seconds 0                            | --seconds must be above 0
        tune --seconds nan                          | got nan
        doctor now                                  | unrecognized arguments: now
        doctor --verbose                            | --verbose
        doctor --output runs                        | --output needs --ranks
        doctor --ranks --local_ranks 0              | --local_ranks must be at least 1, got 0
        doctor --ranks --rank_timeout nan           | --rank_timeout must be at least 1, got nan
        doctor --ranks --device tpu                 | 'tpu'
        completion fish                             | 'fish'
        completion --shell fish                     | 'fish'
        completion --shell ''                       | the value is empty
        completion bash zsh                         | unrecognized arguments: zsh
        completion bash --shell zsh                 | --shell and bash exclude each other
    """,
    "the course's scripts": """
        benchmark.py --size nope                    | 'nope'
        benchmark.py --num_heads 0                  | --num_heads must be
        benchmark.py --d_model 10 --num_heads 3     | --d_model 10 is not divisible
        benchmark.py --context_len 5                | did you mean '--context_length'?
        benchmark.py stray                          | unrecognized arguments: stray
        benchmark.py --forward_only --mode train-step  | exclude each other
        benchmark.py --size tiny --sizes small      | exclude each other
        benchmark.py --output taken                 | 'taken/records.jsonl' is a folder
        benchmark.py --warmup_steps -2              | --warmup_steps must be
        calculate_memory.py --size nope             | 'nope'
        calculate_memory.py --lang fr               | 'fr'
        calculate_memory.py --lang ''               | the value is empty
        calculate_memory.py --context_length 0      | --context_length must be
        calculate_memory.py --precision int8        | 'int8'
        calculate_memory.py --num_layers 1000000    | --num_layers must be at most
        calculate_memory.py stray                   | unrecognized arguments: stray
    """,
}

ODD = """
    bench --help extra                              | usage: cs336 bench
    memory --size TINY                              | memory of tiny
    memory --size tiny --size small                 | memory of small
    memory --context-length=٣٢                      | context 32
    memory --batch_size 1_000                       | batch 1000
    memory --size tiny --checkpoint_blocks 1000     | memory of tiny
    table folder                                    | bench: time by phase
    table folder/                                   | bench: time by phase
    table ./good.jsonl good.jsonl                   | bench: time by phase
    table nan.jsonl                                 | bench: time by phase
    table crlf.jsonl                                | bench: time by phase
    table bom.jsonl                                 | bench: time by phase
    table good.jsonl --experiments bench,           | bench: time by phase
    compare folder good.jsonl                       | B / A of the medians
    completion                                      | complete -o default -F _cs336 cs336
    completion bash                                 | complete -o default -F _cs336 cs336
    completion zsh                                  | bashcompinit
    completion --shell zsh                          | bashcompinit
    calculate_memory.py --lang en --lang zh         | 模型参数
"""
"""Odd inputs that are answered, and part of the answer."""

WITH_REMARK = """
    table cut.jsonl                                 | the last line is torn
    table mixed.jsonl                               | 1 lines left out
    compare mixed.jsonl good.jsonl                  | 1 lines left out
"""
"""Inputs that are answered with one line on standard error besides."""


def cases(text: str) -> list[tuple[str, str]]:
    pairs = (line.split("|", 1) for line in text.strip().splitlines())
    return [(command.strip(), fragment.strip()) for command, fragment in pairs]


class Hang(BaseException):
    """An input that was not answered in time."""


def prepare(folder: Path) -> None:
    """Write the files that the commands name."""
    config, environment = RunConfig().to_dict(), Environment(cpu="a processor")
    metrics = {"forward_time": 0.004, "backward_time": 0.007, "step_time": 0.012, CELL_TIME: 1.0}
    records = [Record("bench", config, name, "s", (v, v), "ok", environment) for name, v in metrics.items()]
    record.append(folder / "good.jsonl", records)
    for name, rate in (("train.jsonl", 1e-3), ("tuned.jsonl", 1e-4)):
        trained = {**config, "first_step": 1, "learning_rate": rate}
        record.append(folder / name, [Record("train", trained, "loss", "1", (1.0, 2.0))])
    good, binary = (folder / "good.jsonl").read_bytes(), bytes(range(256)) * 40
    for name in ("folder", "hollow", "folder.json", "weird ☃ name", "unfinished/.parts", "taken/records.jsonl"):
        (folder / name).mkdir(parents=True)
    shutil.copy(folder / "good.jsonl", folder / "folder" / "records.jsonl")
    for ending in ("jsonl", "json", "pickle", "sqlite", "txt", "npy"):
        (folder / f"empty.{ending}").write_bytes(b"")
        (folder / f"binary.{ending}").write_bytes(binary)
    files = {
        "cut.jsonl": good[:-30],
        "mixed.jsonl": good + b"garbage\n",
        "list.jsonl": b"[1, 2]\n",
        "null.jsonl": b"null\n",
        "other.jsonl": b'{"a": 1}\n',
        "newer.jsonl": good.replace(b'"schema_version":2', b'"schema_version":99'),
        "nan.jsonl": good.replace(b"0.012", b'"nan"'),
        "crlf.jsonl": good.replace(b"\n", b"\r\n"),
        "bom.jsonl": b"\xef\xbb\xbf" + good,
        "utf16.jsonl": '{"a": 1}\n'.encode("utf-16"),
        "notebook.json": b'{"cells": []}',
        "list.json": b"[]",
        "noevents.json": b'{"traceEvents": []}',
        "badevents.json": b'{"traceEvents": [1]}',
        "deep.json": b"[" * 100_000,
        "brackets.json": b"[[[[",
        "cut.json.gz": gzip.compress(b'{"traceEvents": []}')[:-9],
        "words.pickle": pickle.dumps({"a": 1}),
        "evil.pickle": b"cos\nsystem\n(S'true'\ntR.",
        "data.csv": b"a,b\n1,2\n",
        "short.txt": b"abc",
        "text.txt": b"hello world " * 500,
        "odd.bin": b"abc",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for ending in ("jsonl", "json", "sqlite", "txt"):
        os.mkfifo(folder / f"fifo.{ending}")
    (folder / "linked").mkdir()
    (folder / "linked" / ".lock").symlink_to(folder / "good.jsonl")
    with sqlite3.connect(folder / "other.sqlite") as database:
        database.execute("CREATE TABLE a (b)")
    database.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def in_place(place, monkeypatch):
    """In the prepared folder, without a GPU, without a measuring process, and with an end to waiting."""

    def start(*_):
        pytest.fail("a worker was started for an input that cannot be run")

    def give_up(*_):
        raise Hang

    monkeypatch.chdir(place)
    monkeypatch.setattr(runner_module, "Worker", start)
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


PROGRAMS = {"benchmark.py": benchmark, "calculate_memory.py": calculate_memory}


def exit_code(command: str) -> int | str | None:
    words = shlex.split(command)
    function = PROGRAMS.get(words[0])
    try:
        return function(words[1:]) if function else main(words)
    except SystemExit as end:
        return end.code


def listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


ALL_REFUSED = [case for text in REFUSED.values() for case in cases(text)]


@pytest.mark.parametrize(("command", "fragment"), ALL_REFUSED, ids=[command for command, _ in ALL_REFUSED])
def test_bad_inputs_are_refused_in_one_line(command, fragment, place, capsys):
    before = listing(place)
    code = exit_code(command)
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1), printed
    assert fragment in printed.err
    assert printed.err.startswith(("cs336", "benchmark.py: ", "calculate_memory.py: "))
    assert "Traceback" not in printed.err
    assert listing(place) == before


@pytest.mark.parametrize(("command", "fragment"), cases(ODD), ids=[command for command, _ in cases(ODD)])
def test_odd_inputs_are_answered(command, fragment, capsys):
    assert exit_code(command) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert fragment in printed.out


@pytest.mark.parametrize(("command", "fragment"), cases(WITH_REMARK), ids=[c for c, _ in cases(WITH_REMARK)])
def test_damaged_files_are_answered_with_a_remark(command, fragment, capsys):
    assert exit_code(command) == 0
    printed = capsys.readouterr()
    assert fragment in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out


def test_a_long_or_unprintable_value_is_shown_shortened_and_escaped(capsys):
    assert exit_code(f"memory --size {'x' * 10_000}") == 2
    assert len(capsys.readouterr().err) < 1000
    assert exit_code("table '\x1b[31mred'") == 2
    assert r"\x1b[31mred" in capsys.readouterr().err
    assert exit_code("memory --num_layers " + "9" * 5000) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["table {}", "report {}", "bench --output {}", "train --data {}", "inspect {}.json"]
)
def test_a_name_that_is_too_long(command, capsys):
    assert exit_code(command.format("x" * 300)) == 2
    assert "File name too long" in capsys.readouterr().err


def test_there_are_enough_inputs():
    assert len({command for command, _ in ALL_REFUSED}) == len(ALL_REFUSED)
    assert len(ALL_REFUSED) > 250


# -- in processes of their own: the machine's own faults --------------------------------------------------------------


def run(*words: str | Path, cwd: Path, **streams) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command, cwd=cwd, env=clean_env(), text=True, timeout=LIMIT, check=False, **streams)


@pytest.mark.parametrize("words", [["--help"], ["memory"]], ids=" ".join)
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_a_full_standard_output_is_named(words, buffered, place):
    start = [CS336] if buffered else [sys.executable, "-u", "-m", "cs336_systems"]
    with open("/dev/full", "w") as full:
        result = run(*start, *words, cwd=place, stdout=full)
    assert result.returncode == 1
    assert result.stderr.endswith("cannot write to standard output: No space left on device\n")
    assert result.stderr.count("\n") == 1


def test_closed_streams_are_no_failure(place):
    closed = "import os, sys; [os.close(n) for n in (0, 1)]; os.execv(sys.argv[1], sys.argv[1:])"
    result = run(sys.executable, "-c", closed, CS336, "memory", cwd=place)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_deleted_current_directory_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    result = run(sys.executable, "-c", program, CS336, "bench", cwd=gone)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "cs336 bench: the current directory was deleted; change to another one\n"


@pytest.mark.parametrize("command", [["benchmark.py", "--size", "nope"], ["calculate_memory.py", "--lang", "fr"]])
def test_scripts_by_path(command, place):
    name, *words = command
    result = run(sys.executable, PACKAGE / "benchmark" / name, *words, cwd=place)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"{name}: ")


def test_ctrl_c_during_imports_is_one_line(place):
    """The handler is set before anything large is imported; the signal comes from inside the first such import."""
    program = (
        "import os, signal, sys\n"
        "from cs336_systems.__main__ import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'cs336_systems.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()"
    )
    result = run(sys.executable, "-c", program, cwd=place)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "cs336: stopped\n")
