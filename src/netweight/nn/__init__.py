"""Building blocks of live models: hooks, low-rank adapters, principal components, hypernetworks."""

from netweight.nn.apply_lora import applied as applied
from netweight.nn.apply_lora import linear_layers as linear_layers
from netweight.nn.apply_lora import merge_ as merge_
from netweight.nn.hooks import Captures as Captures
from netweight.nn.hooks import capture as capture
from netweight.nn.hooks import edit_outputs as edit_outputs
from netweight.nn.hooks import intervene as intervene
from netweight.nn.hooks import scale as scale
from netweight.nn.hypernetwork import Hypernetwork as Hypernetwork
from netweight.nn.hypernetwork import ParameterLayout as ParameterLayout
from netweight.nn.lora import Adapter as Adapter
from netweight.nn.lora import AdapterStack as AdapterStack
from netweight.nn.lora import LowRank as LowRank
from netweight.nn.lora import combined as combined
