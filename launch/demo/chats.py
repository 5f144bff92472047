"""Chats for a trial: questions about Python's own library, its docstrings as answers; JSON lines in OpenAI's format.

python launch/demo/chats.py > chats.jsonl
"""

import ast
import json
import sysconfig
from pathlib import Path

for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            question = {"role": "user", "content": f"What does {path.stem}.{node.name} do?"}
            answer = {"role": "assistant", "content": text.split("\n\n")[0][:150]}
            print(json.dumps({"messages": [question, answer]}))
