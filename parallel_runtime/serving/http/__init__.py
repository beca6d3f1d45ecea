"""OpenAI's HTTP API over an engine. What is here needs no extra; ``serving.http.server`` needs the extra ``serve``."""

from parallel_runtime.serving.http.settings import HTTP_PREFIX, HttpSettings, load_http_settings

__all__ = ["HTTP_PREFIX", "HttpSettings", "load_http_settings"]
