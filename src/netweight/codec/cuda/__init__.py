"""The codec on NVIDIA's GPUs: netweight's own kernels, compiled for the GPU at hand when they are first used.

Importing this needs neither a GPU nor the extra `cuda`; `unavailable_because` tells whether the kernels can run.
"""

from netweight.codec.cuda.decoding import NO_SUCH_ROW as NO_SUCH_ROW
from netweight.codec.cuda.decoding import BlobLayout as BlobLayout
from netweight.codec.cuda.decoding import DecodePlan as DecodePlan
from netweight.codec.cuda.decoding import LossyLayout as LossyLayout
from netweight.codec.cuda.decoding import decode as decode
from netweight.codec.cuda.decoding import decode_lossy as decode_lossy
from netweight.codec.cuda.decoding import decode_rows as decode_rows
from netweight.codec.cuda.decoding import layout_of as layout_of
from netweight.codec.cuda.decoding import lossy_layout_of as lossy_layout_of
from netweight.codec.cuda.decoding import raise_if_corrupt as raise_if_corrupt
from netweight.codec.cuda.encoding import encode as encode
from netweight.codec.cuda.encoding import encode_into as encode_into
from netweight.codec.cuda.encoding import largest_blob as largest_blob
from netweight.codec.cuda.encoding import layout_of_encoded as layout_of_encoded
from netweight.codec.cuda.encoding import with_checks as with_checks
from netweight.codec.cuda.launching import compile_all as compile_all
from netweight.codec.cuda.launching import launch as launch
from netweight.codec.cuda.launching import unavailable_because as unavailable_because
