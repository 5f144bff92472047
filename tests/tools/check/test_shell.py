"""Scripts are read as bash expands them; bash itself says how."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.errors import RequestError
from frugal.tools.check import shell
from frugal.tools.check.command_line import LAUNCHER, PROGRAM, num_processes, parsed_script
from tests.engine.corpora import refusal

TOLD = "started() { for word; do printf '%s\\0' \"$word\"; done; printf '\\n\\0'; }\n"


def of_bash(script: str) -> list[list[str]]:
    """The words of each command `started`, by bash."""
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run([bash, "-c", TOLD + script], capture_output=True, timeout=20, env={"PATH": "/usr/bin:/bin"})
    words, commands = run.stdout.decode().split("\0")[:-1], [[]]
    for word in words:
        commands[-1].append(word) if word != "\n" else commands.append([])
    return commands[:-1]


def of_frugal(script: str) -> list[list[str]]:
    return [words[1:] for words in shell.commands(script, {}) if words[0] == "started"]


SCRIPTS = [
    "GPUS=${GPUS:-8}\nBATCH=512\nstarted --steps $((BATCH / 4 / GPUS)) --more $(( (BATCH+1) % 7 * -2 ))\n",
    "A='one two' B=\"$A three\"\nstarted $A \"$A\" '$A' ${A}x \"a\\\"b\" \\$A $B\n",
    "ARGS=(--lr 1e-4 \"--name=a b\"\n  # a comment\n  --bf16)\nARGS+=(--more)\n"
    "started \"${ARGS[@]}\" ${ARGS[1]} ${#ARGS[@]} x\"${ARGS[@]}\"y\n",
    "model_args=\"\\\n  --model_name_or_path base \\\n  --use_lora True \\\n\"\n"
    "cmd=\"started -m pkg \\\n $model_args\"\neval $cmd\n",
    "read -r -d '' COMMAND <<EOF\nstarted --zero 3 \\\n   --path $((1+2))\nEOF\n$COMMAND --last\n",
    "cat > /dev/null <<'EOF'\n{\"not\": \"a command\", started: 1}\nEOF\nstarted after 2>&1 && started \\\n  next\n",
    "started a; started b # started c\nif true; then started d; else :; fi\nfor x in one; do started $x; done\n",
    "X=\nstarted ${X:-empty} ${X-unset} ${Y-unset} ${Y:=set} $Y ${X:+no} ${Y:+yes} \"$X\" $X ${Z:-${Y:-4}}\n",
    "bash() { while [ $# -gt 1 ]; do shift; done; eval \"$1\"; }\nbash -c 'started \"inner word\" $((2*3))'\n",
    "started a\\\nb c\\ d $'x' x$ $\"y\"\n",
    "A=(one three)\nB=four\nstarted ${#A} ${#A[1]} ${#A[@]} ${#B} ${A} ${A[5]:-none} ${B[0]}\n",
    "read -r A <<< \"b c\"\nstarted $A\nif read -r D E <<< \"f g\"; then started last; fi\n",
    "export A=1 B='2 3'\nA+=4\nstarted \"$A\" $B -- 2 --x=\"$B\"'c'$A\n",
    "declare -a A=(--x 1 # a comment\n  --y)\ndeclare -r B=2\nstarted \"${A[@]}\" $[B * (3 + 4)] ${1:-9}\n",
    "if ! [ a = a ]; then B=1; fi\nif [ 1 -gt 2 ]; then\n  if [ a = a ]; then A=2; fi\nelse A=3; fi\nstarted $A\n",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    assert of_frugal(script) == of_bash(script) != []


NAMES = st.sampled_from(["A", "B", "C"])
NUMBERS = st.integers(0, 99)
PIECES = st.one_of(
    st.sampled_from(["--x", "a b", "1e-4", "'q r'", '"s t"', "\\ u", "--n=", "k"]).map(
        lambda text: text if text[0] in "'\"\\" else f"'{text}'" if " " in text else text
    ),
    NAMES.map(lambda name: f"${{{name}}}"),
    NAMES.map(lambda name: f'"${{{name}}}"'),
    st.tuples(NAMES, NUMBERS).map(lambda each: f"${{{each[0]}:-{each[1]}}}"),
    st.tuples(NUMBERS, st.sampled_from("+-*"), NUMBERS).map(lambda each: "$(({} {} {}))".format(*each)),
    st.tuples(NUMBERS, st.sampled_from("/%"), st.integers(1, 9)).map(lambda each: "$(({} {} {}))".format(*each)),
    NAMES.map(lambda name: f'"${{{name}[@]}}"'),
)
WORDS = st.lists(PIECES, min_size=1, max_size=3).map("".join)
ASSIGNED = st.one_of(
    st.tuples(NAMES, WORDS).map("=".join),
    st.tuples(NAMES, WORDS).map("+=".join),
    st.tuples(NAMES, st.lists(WORDS, max_size=3).map(" ".join)).map(lambda each: f"{each[0]}=({each[1]})"),
    st.lists(WORDS, min_size=1, max_size=4).map(lambda words: f"started {' '.join(words)}"),
    st.tuples(NAMES, WORDS).map(lambda each: f"read -r {each[0]} <<< {each[1]}"),
    st.lists(WORDS, min_size=1, max_size=4).map(lambda words: "if true; then started " + " \\\n ".join(words) + "; fi"),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(ASSIGNED, min_size=1, max_size=6).map("\n".join))
def test_words_of_any_script_are_those_of_bash(script: str) -> None:
    begin = "A=1\nB='2 3'\nC=--c\n"
    assert of_frugal(begin + script) == of_bash(begin + script)


VALUES = st.sampled_from(["0", "1", "2", "10", "true", ""])
TESTED = st.one_of(
    st.tuples(VALUES, st.sampled_from(["=", "==", "!="]), VALUES),
    st.tuples(NUMBERS, st.sampled_from(["-eq", "-ne", "-lt", "-le", "-gt", "-ge"]), NUMBERS),
).map(lambda each: "[ \"{}\" {} '{}' ]".format(*each))
BRANCHES = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["started $A", "A=4", "A+=5", "started 6", "A=(7 8)"]),
        st.tuples(TESTED, BRANCHES, TESTED, BRANCHES, BRANCHES).map(
            lambda each: "if {}; then {}\nelif {}; then\n{}; else {}; fi".format(*each)
        ),
        st.tuples(TESTED, BRANCHES, BRANCHES).map(lambda each: "if {}\nthen {}; fi; {}".format(*each)),
    )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(BRANCHES, min_size=1, max_size=4).map("\n".join))
def test_of_branches_whose_tests_compare_what_is_known_those_that_bash_takes_are_read(script: str) -> None:
    script = f"A=1\n{script}\nstarted $A"
    assert of_frugal(script) == of_bash(script)


@pytest.mark.parametrize("test", ["[ -f x ]", '[ "$N" = 1 ]', "[ 1 = 1 ] && [ 2 = 2 ]", "[[ a == a* ]]", "((1 < 2))"])
def test_of_other_branches_all_are_read(test: str) -> None:
    script = f"A=1\nif {test}; then A=2; started a; else A=3; started b; fi\nstarted $A"
    assert of_frugal(script) == [["a"], ["b"], ["1"]]


def test_a_branch_that_may_be_taken_gives_a_value_to_what_its_test_asks_for_alone() -> None:
    script = "N=$(nvidia-smi -L | wc -l)\nA=$((8 / N))\nif [ $N == 0 ]; then N=1; fi\n"
    script += 'if [ "$DEBUG" = true ]; then A=1; fi\nstarted $N "$A"\n'
    assert of_frugal(script) == [["1", "$((8 / N))"]]


@pytest.mark.parametrize("quoted", ['"${C[@]}"', '"${C[@]}${C[@]}"', '"x${C[@]}"', '""', "\"${C[@]}\"''"])
def test_an_empty_array_in_quotes_is_no_word(quoted: str) -> None:
    assert of_frugal(f"C=()\nstarted a {quoted} b") == of_bash(f"C=()\nstarted a {quoted} b")


@pytest.mark.parametrize("text", ['>(>("d', "<(", "a >(x", "${", "`"])
def test_what_has_no_end_ends(text: str) -> None:
    list(shell.commands(text, {}))


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("$(){}[]'\"`\\<>|&;#=+-*/%:@! \t\nAforifdone1"), max_size=60))
def test_a_text_that_is_no_script_is_read_to_its_end(text: str) -> None:
    list(shell.commands(text, {}))


def test_what_is_not_known_stays_as_it_is_written() -> None:
    script = 'N=$(nvidia-smi -L | wc -l)\nB=$((64 / N / WORLD))\nstarted --n $N --b $B --m $1 "${M%.*}" $HOME/x\n'
    assert of_frugal(script) == [
        ["--n", "$(nvidia-smi -L | wc -l)", "--b", "$((64 / N / WORLD))", "--m", "$1", "${M%.*}", "$HOME/x"]
    ]


def test_a_variable_keeps_the_value_it_had_before_a_branch_and_a_loop_of_several_rounds_has_none() -> None:
    script = "B=4\nM=\nwhile [ $# -gt 0 ]; do case $1 in --b) B=$2 ;; --m) M=$2 ;; esac; done\n"
    script += 'if [ -n "$BIG" ]; then B=64; fi\nfor LR in 1 2; do started $B $M $LR; done\n'
    assert of_frugal(script) == [["4", "$2", "$LR"]]


@pytest.mark.parametrize(
    ("begin", "program", "gpus"),
    [
        ("srun --gres=gpu:8 --ntasks-per-node=1 torchrun --nproc_per_node 8 train.py", "train.py", 8),
        ("uv run accelerate launch --num_processes 4 src/sft.py", "src/sft.py", 4),
        ("CUDA_VISIBLE_DEVICES=0,1 nohup python3.11 -u train.py", "train.py", 2),
        ("srun bash -c \"python -m torch.distributed.run --nproc_per_node 2 train.py", "train.py", 2),
        ("timeout 9h torchrun --nproc_per_node 2 train.py", "train.py", 2),
        ('run() { echo "$@"; "$@"; }\nrun uv run torchrun --nproc_per_node 2 train.py', "train.py", 2),
        ("deepspeed --num_gpus 2 --module pkg.train", "pkg.train", 2),
        ("torchrun --nproc_per_node 8 -m pkg.finetune --reward own.py", "pkg.finetune", 8),
        ("python launch_jobs.py --cluster c -- torchrun --nproc_per_node 2 train.py", "train.py", 2),
    ],
)  # fmt: skip
def test_the_training_is_seen_behind_what_starts_it(begin: str, program: str, gpus: int) -> None:
    end = '"' if begin.count('"') == 1 else ""
    before = "pip install -e .\npython -c 'import torch'\npython prepare.py --in x\n"
    script = f"{before}{begin} --a 1 --b 2 --c 3 --e 5 --d 4{end}\n"
    content, _ = parsed_script(Path("a.sh"), script)
    assert (content[PROGRAM], content["d"], num_processes(content)) == (program, 4, (gpus, None)), content[LAUNCHER]


@pytest.mark.parametrize(
    "training",
    [
        "$PYTHON train.py --output_dir out --per_device_train_batch_size 2",
        "accelerate launch train.py --more",
        "accelerate launch --num_processes 2 train.py recipe.yaml",
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_training_is_told_from_what_samples_or_evaluates(training: str, is_first: bool) -> None:
    flags = " ".join(f"--{name} 1" for name in ("model", "k", "temperature", "seed", "batch_size", "num_samples"))
    training = training.replace("--more", f"{flags} --train_batch_size 4")
    commands = [f"python generate.py {flags}", training, f"CUDA_VISIBLE_DEVICES=0 python eval.py {flags} &"]
    content, _ = parsed_script(Path("a.sh"), "\n".join(sorted(commands, reverse=is_first)))
    assert content[PROGRAM] == "train.py"


def test_ms_swift_is_named(tmp_path: Path) -> None:
    from frugal.tools.check.document import read

    for command in ("swift sft --model Q", "torchrun swift/cli/sft.py", "NPROC_PER_NODE=8 megatron sft"):
        (tmp_path / "a.sh").write_text(f"{command} --per_device_train_batch_size 1 \\\n --lora_rank 8\n")
        assert "a.sh starts ms-swift, whose arguments frugal does not read\n" in refusal(
            lambda: read(tmp_path / "a.sh")
        )


def test_a_script_that_trains_nothing_says_so() -> None:
    with pytest.raises(RequestError, match="starts no training script"):
        parsed_script(
            Path("a.sh"), "echo python x.py\nconda create -n e python\nwhich accelerate deepspeed\nf() {\n ls\n}\n"
        )


def test_a_training_loop_in_python_is_for_a_dry_run() -> None:
    with pytest.raises(RequestError, match=r"`frugal dryrun train\.py` predicts the memory of a training loop"):
        parsed_script(Path("train.py"), "from transformers import TrainingArguments\n")
