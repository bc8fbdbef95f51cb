"""Task files for lm-evaluation-harness."""

from pathlib import Path


def task_file(rows: Path, name: str) -> Path:
    """Write the multiple-choice task `name` on the questions in a .jsonl file, beside that file; return its path."""
    path = rows.with_name(f"{name}.yaml")
    path.write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    return path
