"""Engines as processes, for the demo, the live tests and the benchmarks: emulated, real vLLM, real SGLang."""
