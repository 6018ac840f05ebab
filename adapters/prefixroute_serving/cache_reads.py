"""Whether an engine looks a request's prompt up in its cache, so that its count of cached tokens says what it held.

Rules:
1. An engine that has to show something of every prompt token (`echo`, log probabilities of the prompt) computes them
   all and reports 0. So does one that does more than a list of known fields says: a field that is not known may shape
   the prompt, or the way it is computed. A client that sends such requests must not make a cache look empty.
2. It is asked only about answers that told less than was predicted, since a hit speaks for itself. Where nothing was
   predicted a field that is not known does no harm, and the answer still tells how fast the engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

_PLAIN: Final = frozenset(
    [
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "data_parallel_rank",
        "ebnf",
        "extra_key",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "json_schema",
        "length_penalty",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "no_stop_trim",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "prompt",
        "regex",
        "repetition_penalty",
        "request_id",
        "response_format",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "rid",
        "routed_dp_rank",
        "seed",
        "separate_reasoning",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "store",
        "stream",
        "stream_options",
        "stream_reasoning",
        "structured_outputs",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    ]
)
"""Fields of vLLM 0.32 and SGLang 0.5 that leave it as it is, whatever their value."""

_WITH: Final[Mapping[str, Callable[[Any], bool]]] = {
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "logprob_start_len": lambda value: value == -1,
    "logprobs": lambda value: isinstance(value, (bool, int)),
    "n": lambda value: value == 1,
    "prompt_logprobs": lambda _: False,
    "return_prompt_logprobs": lambda _: False,
    "return_logprob": lambda value: value is False,
    "suffix": lambda value: value == "",
    "use_beam_search": lambda value: value is False,
}
"""Fields that do so with these values only. Log probabilities of the answer alone are such; those of the prompt go by
`prompt_logprobs`, 0 included, by `echo`, or by SGLang's own fields."""

_read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value = msgspec.json.Decoder().decode


def reads_cache(body: bytes, strict: bool = True) -> bool:
    """Whether an engine reads its cache for this request as for any other, for all that is known. O(body).

    A field that is null is one that was left out. One that is not known speaks against it, if `strict`. Never raises.
    """
    try:
        fields = _read(body)
        return all(
            name in _PLAIN or bytes(raw) == b"null" or (_WITH[name](_value(raw)) if name in _WITH else not strict)
            for name, raw in fields.items()
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
