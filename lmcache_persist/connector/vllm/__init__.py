"""The connector for vLLM: ``kv_connector_module_path`` is this package."""

from lmcache_persist.connector.vllm.connector import PersistConnector

__all__ = ["PersistConnector"]
