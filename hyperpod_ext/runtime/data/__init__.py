"""Data loaders and samplers for elastic jobs, and token stores.

A loader reads each sample once per epoch, in the same order for any history of world sizes. A token store is a folder
of memory-mapped files, with one copy per node. No process owns the files of a token store, so the files outlive killed
workers.

    from hyperpod_ext.runtime.data import ElasticDataLoader, Packed, TensorSource, follow

A token store is built once (by `build`, `follow`, or `hp-ext data build`), and its documents are read by number. A
token store outlives processes and pods. The names of this package are imported on first use, so importing the package
is fast. Reading a token store needs numpy, but not torch.
"""

from typing import TYPE_CHECKING

from hyperpod_ext.lazy import loader

if TYPE_CHECKING:
    from hyperpod_ext.config.elastic import batch_at as batch_at
    from hyperpod_ext.config.scales import plan_scales as plan_scales
    from hyperpod_ext.runtime.data.convert.background import Conversion as Conversion
    from hyperpod_ext.runtime.data.convert.background import follow as follow
    from hyperpod_ext.runtime.data.convert.convert import build as build
    from hyperpod_ext.runtime.data.loader import ElasticDataLoader as ElasticDataLoader
    from hyperpod_ext.runtime.data.loader import Step as Step
    from hyperpod_ext.runtime.data.mixing import Mixture as Mixture
    from hyperpod_ext.runtime.data.positions import Slot as Slot
    from hyperpod_ext.runtime.data.sampler import ElasticBatchSampler as ElasticBatchSampler
    from hyperpod_ext.runtime.data.schedule import learning_rate as learning_rate
    from hyperpod_ext.runtime.data.shuffle import BlockShuffle as BlockShuffle
    from hyperpod_ext.runtime.data.sources import Shards as Shards
    from hyperpod_ext.runtime.data.sources import Stream as Stream
    from hyperpod_ext.runtime.data.token_store.arrow import ArrowStore as ArrowStore
    from hyperpod_ext.runtime.data.token_store.eviction import evict as evict
    from hyperpod_ext.runtime.data.token_store.megatron import MegatronStore as MegatronStore
    from hyperpod_ext.runtime.data.token_store.packed import Packed as Packed
    from hyperpod_ext.runtime.data.token_store.reader import TokenStore as TokenStore
    from hyperpod_ext.runtime.data.token_store.ring import ReadyRing as ReadyRing
    from hyperpod_ext.runtime.data.token_store.tensors import TensorSource as TensorSource

_MODULES = {
    "ArrowStore": ".token_store.arrow",
    "BlockShuffle": ".shuffle",
    "Conversion": ".convert.background",
    "ElasticBatchSampler": ".sampler",
    "ElasticDataLoader": ".loader",
    "MegatronStore": ".token_store.megatron",
    "Mixture": ".mixing",
    "Packed": ".token_store.packed",
    "ReadyRing": ".token_store.ring",
    "Shards": ".sources",
    "Slot": ".positions",
    "Step": ".loader",
    "Stream": ".sources",
    "TensorSource": ".token_store.tensors",
    "TokenStore": ".token_store.reader",
    "batch_at": "hyperpod_ext.config.elastic",
    "build": ".convert.convert",
    "evict": ".token_store.eviction",
    "follow": ".convert.background",
    "learning_rate": ".schedule",
    "plan_scales": "hyperpod_ext.config.scales",
}

__all__ = sorted(_MODULES)

__getattr__ = loader(__name__, _MODULES)
