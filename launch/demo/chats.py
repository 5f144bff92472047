"""Chats for a trial: questions about Python's own library, its docstrings as answers; JSON lines in OpenAI's format.

python launch/demo/chats.py > chats.jsonl
python launch/demo/chats.py question reply > tickets.jsonl   # two columns by these names instead
"""

import ast
import json
import sys
import sysconfig
from pathlib import Path

for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            question = {"role": "user", "content": f"What does {path.stem}.{node.name} do?"}
            answer = {"role": "assistant", "content": text.split("\n\n")[0][:150]}
            columns = dict(zip(sys.argv[1:], (question["content"], answer["content"]), strict=False))
            print(json.dumps(columns or {"messages": [question, answer]}))
