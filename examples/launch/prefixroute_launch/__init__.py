"""Start engines on this machine: emulated ones, or vLLM and SGLang on the CPU with made-up weights.

| file | is |
|---|---|
| `launcher.py` | what every launcher takes and gives, and the emulator's |
| `real_engine.py` | what the launchers of real engines share |
| `vllm_launcher.py`, `sglang_launcher.py` | what differs |
| `build_model.py` | the made-up model, run by the engine's own Python |
| `processes.py` | child processes that end with their parent's use of them, and free ports |
"""
