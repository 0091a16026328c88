"""The worker's half of vLLM's weight transfer for machines without a GPU: the TCP store underneath NCCL's group in its place.

The test of `PolicyServers(transfer="nccl")` gives it to vLLM with --worker-extension-cls, which imports it.
"""

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class StoreEngine(NCCLWeightTransferEngine):
    def init_transfer_engine(self, info):
        rank = self.parallel_config.rank + info.rank_offset
        self.model_update_group = StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)

    def receive_weights(self, info):
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes):
            weight = self.model_update_group.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)), src=0)
            self.model.load_weights([(name, weight)])

    def shutdown(self):
        self.model_update_group = None


WeightTransferEngineFactory.register_engine("store", StoreEngine)


class Extension:
    pass
