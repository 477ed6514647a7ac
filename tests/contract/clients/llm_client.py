"""llm (the command line): chat, streamed and plain."""

import json
import os
import pathlib
import subprocess
import sys

home = pathlib.Path(os.environ["LLM_USER_PATH"])
home.mkdir(parents=True, exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: ingle\n  model_name: chat\n  api_key_name: ingle\n  api_base: {os.environ['OPENAI_BASE_URL']}\n"
)
(home / "keys.json").write_text(json.dumps({"ingle": os.environ["OPENAI_API_KEY"]}))
program = str(pathlib.Path(sys.executable).with_name("llm"))
for flags in ([], ["--no-stream"]):
    command = [program, "-m", "ingle", *flags, "-o", "temperature", "0", "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Paris" in done.stdout, done.stdout + done.stderr
print("chat, stream")
