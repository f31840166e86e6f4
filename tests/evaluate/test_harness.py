"""Tasks of lm-evaluation-harness with our model, against the harness's own model of the same folder.

Only where the extra is installed: pip install -e '.[eval]' accelerate.
"""

from __future__ import annotations

import json

import pytest

from tests.evaluate.models import FOLDER, ours

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")

NAMES, THINGS = ("Lily", "Tom", "Ben", "Mia"), ("ball", "dog", "park", "cake")
SHARED = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "dog"
generation_kwargs: {until: ["."], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"Once upon a time, there was a girl named {name}. She liked to play with her",
            "choices": [THINGS[(i + k) % 4] for k in range(3)],
            "gold": i % 3,
            "text": f"{name} went to the {thing}. It was a sunny day and {name} was happy.",
        }
        for i, (name, thing) in enumerate((name, thing) for name in NAMES for thing in THINGS)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}" + SHARED.format(data=folder / "rows.jsonl") + text)
    return folder


def test_equals_the_harness_own_model(tasks, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from titanlike.evaluate.harness import run_tasks

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = ours()
    mine = run_tasks(
        model,
        tokenizer,
        list(TASKS),
        add_bos=True,
        batch_tokens=256,
        few_shot=None,
        limit=None,
        include=str(tasks),
    )
    manager = TaskManager(include_path=str(tasks))
    for name in TASKS:
        # Theirs would put a second begin-of-text before text that is scored as a whole.
        theirs = HFLM(str(FOLDER), dtype="float32", device="cpu", add_bos_token=name != "tiny_rolling")
        want = lm_eval.simple_evaluate(theirs, tasks=[name], task_manager=manager)["results"][name]
        for metric, value in want.items():
            if isinstance(value, float):
                assert mine[name][metric] == pytest.approx(value, rel=1e-5), (name, metric)


def test_an_unknown_task(tasks):
    from titanlike.errors import ConfigError
    from titanlike.evaluate.harness import run_tasks

    model, tokenizer = ours()
    with pytest.raises(ConfigError, match="knows no nosuch"):
        run_tasks(
            model, tokenizer, ["nosuch"], add_bos=True, batch_tokens=1, few_shot=None, limit=None, include=str(tasks)
        )
