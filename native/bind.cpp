// The Python module netweight.codec._native. Everything Python is here; arguments are buffers, so no array is ever converted.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "blob.h"
#include "buffer_pool.h"
#include "job_queue.h"
#include "plane.h"
#include "products.h"

namespace nb = nanobind;
using namespace netweight;

namespace {

// A contiguous buffer of a Python object, held while this lives.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) nb::raise_python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  u8* data() const { return static_cast<u8*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  std::span<const u8> bytes() const { return {data(), size()}; }

 private:
  Py_buffer view_;
};

// The base that a tensor is stored against, or None.
class Base {
 public:
  explicit Base(nb::handle object) {
    if (!object.is_none()) buffer_.emplace(object, false);
  }
  // Its bytes for a tensor of so many; nullptr when there is none.
  const u8* of(u64 nbytes) const {
    if (!buffer_) return nullptr;
    if (buffer_->size() != nbytes) throw nb::value_error("the base has another size than the tensor");
    return buffer_->data();
  }
  const u8* needed_by(const BlobHeader& h, u64 nbytes) const {
    if (!h.has_base) return nullptr;
    if (!buffer_) throw nb::value_error("it holds differences from a base, which is missing");
    return of(nbytes);
  }

 private:
  std::optional<Buffer> buffer_;
};

using Bytes = nb::ndarray<nb::numpy, u8, nb::ndim<1>>;

// An uninitialized array from the pool that decoded tensors come from.
Bytes pooled_array(size_t size) {
  void* buffer = buffer_pool::acquire(size);
  nb::capsule owner(buffer, [](void* p) noexcept { buffer_pool::release(p); });
  return Bytes(buffer, {size}, owner);
}

// An output for what a blob declares, which a stranger's may do without bound; no encoder at its default chunk size goes so far.
Bytes output_for(u64 nbytes, size_t stored) {
  if (nbytes > u64{1} << 28 && nbytes >> 17 >= stored) {
    const std::string sizes = "its " + std::to_string(stored) + " bytes declare " + std::to_string(nbytes) +
                              "; decode it chunk by chunk, or to memory of your own (decode_into)";
    throw nb::value_error(sizes.c_str());
  }
  return pooled_array(static_cast<size_t>(nbytes));
}

nb::tuple shape_tuple(const BlobHeader& h) {
  nb::list shape;
  for (u64 d : h.shape) shape.append(d);
  return nb::tuple(shape);
}

nb::tuple header_tuple(const BlobHeader& h) {
  nb::list starts;
  for (u64 s : h.chunk_start) starts.append(s);
  return nb::make_tuple(h.dtype->name, shape_tuple(h), h.nbytes, static_cast<int>(h.level), h.chunk_log2,
                        nb::bytes(reinterpret_cast<const char*>(h.digest), 16), nb::tuple(starts), h.numbers,
                        nb::bytes(reinterpret_cast<const char*>(h.base_digest), h.has_base ? 16 : 0));
}

Encoding encoding_of(const Dtype& dtype, int level, int chunk_log2, bool gpu_modes, const u8* base) {
  if (chunk_log2 == 0) chunk_log2 = default_chunk_log2(dtype);
  if (chunk_log2 < kMinChunkLog2 || chunk_log2 > kMaxChunkLog2) throw nb::value_error("chunk_log2 must be 10 to 22");
  if (level < 0 || level > static_cast<int>(Level::max)) throw nb::value_error("level must be 0 to 3");
  if (gpu_modes && base) throw nb::value_error("GPU kernels do not decode differences from a base");
  return {static_cast<Level>(level), chunk_log2, gpu_modes, base};
}

// A bytes object of at most `bound` bytes that `write` fills; it returns how many.
template <typename Write>
nb::object written(size_t bound, Write write) {
  PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bound));
  if (!out) nb::raise_python_error();
  size_t size;
  try {
    nb::gil_scoped_release release;
    u8* to = reinterpret_cast<u8*>(PyBytes_AS_STRING(out));
    buffer_pool::advise_huge_pages(to, bound);
    size = write(to);
  } catch (...) {
    Py_DECREF(out);
    throw;
  }
  if (_PyBytes_Resize(&out, static_cast<Py_ssize_t>(size)) != 0) nb::raise_python_error();
  return nb::steal(out);
}

nb::object encode_as(const Dtype& dtype, const Buffer& in, const std::vector<u64>& shape, const Encoding& how, int threads, const std::string& path) {
  const Kernels& kernels = kernels_by_name(path.c_str());
  if (tensor_bytes(dtype, shape) != in.size()) throw nb::value_error("the buffer's size does not fit dtype and shape");
  if (shape.size() > kMaxDims) throw nb::value_error("a tensor of more than 64 dimensions");
  return written(encode_bound(dtype, shape, how.chunk_log2), [&](u8* to) { return encode(in.bytes(), dtype, shape, how, threads, kernels, to); });
}

nb::object encode_bytes(nb::handle tensor, const std::string& dtype_name, const std::vector<u64>& shape, int level, int chunk_log2, int threads,
                        const std::string& path, nb::handle base, bool gpu_modes) {
  Buffer in(tensor, false);
  const Base other(base);
  const Dtype& dtype = dtype_by_name(dtype_name.c_str());
  return encode_as(dtype, in, shape, encoding_of(dtype, level, chunk_log2, gpu_modes, other.of(in.size())), threads, path);
}

// One chunk, its check, that of the base's numbers, and whether it has a transform or a mode that GPU kernels do not decode.
nb::tuple encode_chunk_alone(nb::handle numbers, const std::string& dtype_name, int level, const std::string& path, nb::handle base) {
  Buffer in(numbers, false);
  const Base other(base);
  const Dtype& dtype = dtype_by_name(dtype_name.c_str());
  const Kernels& kernels = kernels_by_name(path.c_str());
  if (in.size() % dtype.unit_bytes || in.size() / dtype.unit_bytes > size_t{1} << kMaxChunkLog2) throw nb::value_error("a chunk has another size");
  const Encoding how = encoding_of(dtype, level, 0, false, other.of(in.size()));
  const Room room(encode_one_bound(dtype, in.size()));  // bytes that are cut to size would be new pages every time
  EncodedChunk found;
  {
    nb::gil_scoped_release release;
    found = encode_one(in.bytes(), dtype, how, kernels, room.get());
  }
  return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(room.get()), found.size), found.check, found.base_check, found.cpu_modes);
}

// Words of a lossy blob: a plain blob of type U16, split where floating-point numbers of so many mantissa bits would be.
nb::object encode_words(nb::handle words, int mantissa_bits, int level, int chunk_log2, int threads, const std::string& path, bool gpu_modes) {
  Buffer in(words, false);
  Dtype dtype = dtype_by_name("U16");
  dtype.exponent_bits = static_cast<u8>(15 - mantissa_bits);
  dtype.mantissa_bits = static_cast<u8>(mantissa_bits);
  return encode_as(dtype, in, {in.size() / 2}, encoding_of(dtype, level, chunk_log2, gpu_modes, nullptr), threads, path);
}

Rounding rounding_of(const std::string& dtype, int mantissa_bits, u64 block, bool reference, double numerator, double denominator) {
  if (mantissa_bits < 0 || mantissa_bits > 6) throw nb::value_error("mantissa_bits must be 0 to 6");
  const FloatType type = dtype == "BF16" ? FloatType::brain : dtype == "F16" ? FloatType::half : FloatType::single;
  return {type, mantissa_bits, block, reference, numerator, denominator};
}

// Rounds weights into arrays of the caller's, of the sizes that they need: the largest relative change, and the places of
// weights to be kept exactly.
nb::tuple round_weights(nb::handle weights, const std::string& dtype, int mantissa_bits, u64 block, bool reference, double numerator, double denominator,
                        nb::handle words, nb::handle normalizers, nb::handle values, const std::string& path) {
  const Rounding rounding = rounding_of(dtype, mantissa_bits, block, reference, numerator, denominator);
  Buffer in(weights, false), to_words(words, true), to_normalizers(normalizers, true), to_values(values, true);
  const size_t count = in.size() / rounding.unit(), blocks = block == 0 ? 0 : static_cast<size_t>((count + block - 1) / block);
  if (in.size() % rounding.unit() != 0 || to_words.size() != 2 * count || to_normalizers.size() != blocks || to_values.size() != in.size())
    throw nb::value_error("the arrays do not fit the weights");
  const Kernels& kernels = kernels_by_name(path.c_str());
  std::vector<u64> escapes;
  double worst;
  {
    nb::gil_scoped_release release;
    worst = kernels.round_weights(in.data(), count, rounding, reinterpret_cast<u16*>(to_words.data()), to_normalizers.data(), to_values.data(), escapes);
  }
  nb::list places;
  for (u64 place : escapes) places.append(place);
  return nb::make_tuple(worst, places);
}

void decode_to(std::span<const u8> blob, const BlobHeader& h, u64 first, u64 last, u8* out, int threads, bool check, const Kernels& kernels,
               const Base& base) {
  const u8* other = base.needed_by(h, h.nbytes);
  nb::gil_scoped_release release;
  decode_range(blob, h, first, last, other, check, threads, kernels, out);
}

// The tensor's bytes, the name of its element type, its shape.
nb::tuple decode(nb::handle blob, int threads, bool check, const std::string& path, nb::handle base) {
  Buffer in(blob, false);
  const Kernels& kernels = kernels_by_name(path.c_str());
  BlobHeader h = read_header(in.bytes());
  Bytes out = output_for(h.nbytes, in.size());
  decode_to(in.bytes(), h, 0, h.numbers, out.data(), threads, check, kernels, Base(base));
  return nb::make_tuple(out, h.dtype->name, shape_tuple(h));
}

void check_size(u64 output, u64 tensor) {
  if (output == tensor) return;
  const std::string sizes = "the output has " + std::to_string(output) + " bytes where the tensor has " + std::to_string(tensor);
  throw nb::value_error(sizes.c_str());
}

// Numbers [first, last) of a tensor to memory of the caller's that is known by address and size, which is quicker to ask of a torch tensor than a buffer.
// Without `last` all numbers from the first on.
void decode_to_address(nb::handle blob, uintptr_t address, size_t nbytes, int threads, bool check, const std::string& path, nb::handle base, u64 first,
                       std::optional<u64> last) {
  Buffer in(blob, false);
  const Kernels& kernels = kernels_by_name(path.c_str());
  const BlobHeader h = read_header(in.bytes());
  const u64 end = last.value_or(h.numbers);
  if (first > end || end > h.numbers) throw nb::value_error("the range lies outside the tensor");
  check_size(nbytes, (end - first) * h.dtype->unit_bytes);
  decode_to(in.bytes(), h, first, end, reinterpret_cast<u8*>(address), threads, check, kernels, Base(base));
}

Bytes decode_numbers(nb::handle blob, u64 first, u64 last, int threads, bool check, const std::string& path, nb::handle base) {
  Buffer in(blob, false);
  const Kernels& kernels = kernels_by_name(path.c_str());
  BlobHeader h = read_header(in.bytes());
  if (first > last || last > h.numbers) throw nb::value_error("the range lies outside the tensor");
  Bytes out = output_for((last - first) * h.dtype->unit_bytes, in.size());
  decode_to(in.bytes(), h, first, last, out.data(), threads, check, kernels, Base(base));
  return out;
}

// Chunk `number` of a blob of `size` bytes whose header and index are at hand.
void decode_chunk_alone(nb::handle header, u64 size, size_t number, nb::handle chunk, nb::handle out, bool check, const std::string& path,
                        nb::handle base) {
  Buffer start(header, false), in(chunk, false), to(out, true);
  const Base other(base);
  const Kernels& kernels = kernels_by_name(path.c_str());
  const BlobHeader h = read_header(start.bytes(), size);
  if (number >= h.chunks() || in.size() != h.chunk_start[number + 1] - h.chunk_start[number] ||
      to.size() != h.numbers_in_chunk(number) * h.dtype->unit_bytes)
    throw nb::value_error("the chunk, or the output for it, has another size");
  const u8* from = other.needed_by(h, to.size());
  nb::gil_scoped_release release;
  decode_one(in.bytes(), h, number, from, check, kernels, to.data());
}

Words words_of(const BlobHeader& h, u64 first, u64 last, const Rounding& rounding, const Buffer& normalizers) {
  if (h.dtype->unit_bytes != 2 || first > last || last > h.numbers) throw nb::value_error("the range does not fit the words");
  if (rounding.block != 0 && first < last && normalizers.size() != (last - 1) / rounding.block - first / rounding.block + 1)
    throw nb::value_error("the normalizers do not fit the range");
  return {rounding, normalizers.data()};
}

// Weights [first, last) of a lossy blob's words to memory of the caller's.
void decode_words_to_address(nb::handle words, nb::handle normalizers, const std::string& dtype, int mantissa_bits, u64 block, bool reference, u64 first,
                             u64 last, uintptr_t address, size_t nbytes, int threads, const std::string& path) {
  const Rounding rounding = rounding_of(dtype, mantissa_bits, block, reference, 0, 1);
  Buffer in(words, false), factors(normalizers, false);
  const Kernels& kernels = kernels_by_name(path.c_str());
  const BlobHeader h = read_header(in.bytes());
  if ((last - first) * rounding.unit() != nbytes) throw nb::value_error("the output does not fit the range");
  const Words found = words_of(h, first, last, rounding, factors);
  nb::gil_scoped_release release;
  decode_words(in.bytes(), h, first, last, found, threads, kernels, reinterpret_cast<u8*>(address));
}

u16* words_at(uintptr_t address) { return reinterpret_cast<u16*>(address); }

// A weight in the fixed-length form, known by address, to memory of the caller's.
void decode_fixed_to_address(uintptr_t payload, size_t size, size_t rows, size_t columns, uintptr_t out, int threads, const std::string& path) {
  const FixedMatrix weight = read_fixed(reinterpret_cast<const u8*>(payload), size, rows, columns);
  nb::gil_scoped_release release;
  decode_fixed(weight, threads, products_by_name(path), words_at(out));
}

// How many weights have each of the 256 exponents, and how many are zeros.
std::pair<std::vector<u64>, u64> exponents_at_address(uintptr_t weights, size_t count, int threads) {
  Exponents found;
  {
    nb::gil_scoped_release release;
    found = exponents_of(words_at(weights), count, threads);
  }
  return {{found.weights.begin(), found.weights.end()}, found.zeros};
}

// A weight to a payload in the fixed-length form, whose header the caller writes; both known by address.
void encode_fixed_to_address(uintptr_t weights, size_t rows, size_t columns, int base, size_t escapes, uintptr_t payload, size_t size, int threads,
                             const std::string& path) {
  nb::gil_scoped_release release;
  encode_fixed(words_at(weights), rows, columns, base, escapes, threads, products_by_name(path), {reinterpret_cast<u8*>(payload), size});
}

Order checked_order(int kind, size_t width, size_t columns, const Products& products) {
  const bool by_sums = kind == Order::kSums && (width == 64 || width == 128) && columns % width == 0;
  const bool blocks = products.multiply_in_blocks && columns % 2 == 0 && width > 0 && (width % 32 == 0 || width >= columns);
  if (!by_sums && !(blocks && (kind == Order::kPairs || (kind == Order::kTiles && width == 32)))) throw nb::value_error("so many columns cannot be added up so");
  return {static_cast<Order::Kind>(kind), width};
}

// Products of all inputs with a weight in the fixed-length form or, where `size` is 0, with plain weights; all bf16, known by address.
void multiply_at_addresses(uintptr_t weights, size_t size, size_t rows, size_t columns, uintptr_t x, size_t inputs, uintptr_t bias, int kind,
                           size_t width, uintptr_t y, size_t stride, int threads, const std::string& path) {
  const Products& products = products_by_name(path);
  const Order order = checked_order(kind, width, columns, products);
  const FixedMatrix weight = size ? read_fixed(reinterpret_cast<const u8*>(weights), size, rows, columns) : FixedMatrix{nullptr, nullptr, nullptr, rows, columns, 0, 0};
  nb::gil_scoped_release release;
  multiply(size ? nullptr : words_at(weights), weight, words_at(x), inputs, bias ? words_at(bias) : nullptr, order, threads, products, words_at(y), stride);
}

// The same of a blob of bf16, whose chunks are decoded and multiplied one by one; with `check` each is compared with its check.
void multiply_blob(nb::handle blob, size_t rows, size_t columns, uintptr_t x, size_t inputs, uintptr_t bias, int kind, size_t width, uintptr_t y,
                   size_t stride, int threads, bool check, const std::string& path) {
  Buffer in(blob, false);
  const Products& products = products_by_name(path);
  const Kernels& kernels = kernels_by_name("auto");
  const BlobHeader h = read_header(in.bytes());
  if (std::strcmp(h.dtype->name, "BF16") != 0 || columns == 0 || h.numbers / columns != rows || h.numbers % columns != 0)
    throw nb::value_error("the blob is not that of a bf16 weight of this shape");
  const Order order = checked_order(kind, width, columns, products);
  Base(nb::none()).needed_by(h, h.nbytes);
  nb::gil_scoped_release release;
  const Decode decode = [&](u64 first, u64 last, u16* out) {
    RangeDecoder decoder(in.bytes(), h, first, last, nullptr, check, kernels, reinterpret_cast<u8*>(out));
    decoder.work();
    decoder.check();
  };
  // Whole chunks that fill a core's cache, and rows enough that few of them are shared by two steps.
  const u64 chunk = u64{1} << h.chunk_log2, wanted = std::max<u64>(u64{1} << 18, 8 * columns);
  multiply_decoded(decode, (wanted + chunk - 1) / chunk * chunk, rows, columns, words_at(x), inputs, bias ? words_at(bias) : nullptr, order, threads, products, words_at(y),
                   stride);
}

// A decoding on which another thread may work, too.
class Decoding {
 public:
  explicit Decoding(nb::handle blob) : Decoding(blob, nb::bytes("", 0), std::nullopt) {}
  // With a rounding the blob is that of words, and what comes out are weights.
  Decoding(nb::handle blob, nb::handle normalizers, std::optional<Rounding> rounding)
      : in_(blob, false),
        normalizers_(normalizers, false),
        header_(read_header(in_.bytes())),
        words_(rounding ? std::optional(words_of(header_, 0, header_.numbers, *rounding, normalizers_)) : std::nullopt),
        out_(output_for(rounding ? header_.numbers * rounding->unit() : header_.nbytes, in_.size())),
        decoder_(in_.bytes(), header_, 0, header_.numbers, Base(nb::none()).needed_by(header_, 0), false, kernels_by_name("auto"), out_.data(), words_),
        job_(std::make_shared<Job>([this] { decoder_.work(); })) {}
  ~Decoding() { cancel(); }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  const std::shared_ptr<Job>& job() const { return job_; }
  nb::tuple result() {
    {
      nb::gil_scoped_release release;
      job_->wait();
    }
    decoder_.check();
    return nb::make_tuple(out_, header_.dtype->name, shape_tuple(header_));
  }
  void cancel() {
    nb::gil_scoped_release release;
    decoder_.stop();
    job_->close();
  }

 private:
  Buffer in_, normalizers_;
  BlobHeader header_;
  std::optional<Words> words_;
  Bytes out_;
  RangeDecoder decoder_;
  std::shared_ptr<Job> job_;
};

class DecodeQueue {
 public:
  DecodeQueue() : queue_(std::make_unique<JobQueue>()) {}
  ~DecodeQueue() { close(); }
  std::unique_ptr<Decoding> add(nb::handle blob) { return add(std::make_unique<Decoding>(blob)); }
  std::unique_ptr<Decoding> add_words(nb::handle words, nb::handle normalizers, const std::string& dtype, int mantissa_bits, u64 block, bool reference) {
    return add(std::make_unique<Decoding>(words, normalizers, rounding_of(dtype, mantissa_bits, block, reference, 0, 1)));
  }
  void close() {
    nb::gil_scoped_release release;
    queue_.reset();
  }

 private:
  std::unique_ptr<Decoding> add(std::unique_ptr<Decoding> decoding) {
    if (!queue_) throw nb::value_error("the queue is closed");
    queue_->add(decoding->job());
    return decoding;
  }
  std::unique_ptr<JobQueue> queue_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "netweight's codec in C++; use netweight.codec";
  nb::exception<CorruptError>(m, "CorruptError", PyExc_ValueError);
  nb::exception<UnsupportedError>(m, "UnsupportedError", PyExc_ValueError);
  m.def("encode", &encode_bytes, nb::arg("tensor"), nb::arg("dtype"), nb::arg("shape"), nb::arg("level"), nb::arg("chunk_log2"), nb::arg("threads"),
        nb::arg("path"), nb::arg("base") = nb::none(), nb::arg("gpu_modes") = false);
  m.def("encode_chunk", &encode_chunk_alone, nb::arg("numbers"), nb::arg("dtype"), nb::arg("level"), nb::arg("path"), nb::arg("base") = nb::none());
  m.def(
      "read_header",
      [](nb::handle blob, std::optional<u64> size) {
        Buffer in(blob, false);
        return header_tuple(read_header(in.bytes(), size.value_or(in.size())));
      },
      nb::arg("blob"), nb::arg("size") = nb::none());
  m.def("decode", &decode, nb::arg("blob"), nb::arg("threads"), nb::arg("check"), nb::arg("path"), nb::arg("base") = nb::none());
  m.def("decode_to_address", &decode_to_address, nb::arg("blob"), nb::arg("address"), nb::arg("nbytes"), nb::arg("threads"), nb::arg("check"),
        nb::arg("path"), nb::arg("base") = nb::none(), nb::arg("first") = 0, nb::arg("last") = nb::none());
  m.def("decode_numbers", &decode_numbers, nb::arg("blob"), nb::arg("first"), nb::arg("last"), nb::arg("threads"), nb::arg("check"), nb::arg("path"),
        nb::arg("base") = nb::none());
  m.def("decode_chunk", &decode_chunk_alone, nb::arg("header"), nb::arg("size"), nb::arg("number"), nb::arg("chunk"), nb::arg("out"), nb::arg("check"),
        nb::arg("path"), nb::arg("base") = nb::none());
  m.def("encode_words", &encode_words, nb::arg("words"), nb::arg("mantissa_bits"), nb::arg("level"), nb::arg("chunk_log2"), nb::arg("threads"),
        nb::arg("path"), nb::arg("gpu_modes") = false);
  m.def("round_weights", &round_weights, nb::arg("weights"), nb::arg("dtype"), nb::arg("mantissa_bits"), nb::arg("block"), nb::arg("reference"),
        nb::arg("numerator"), nb::arg("denominator"), nb::arg("words"), nb::arg("normalizers"), nb::arg("values"), nb::arg("path"));
  m.def("decode_words", &decode_words_to_address, nb::arg("words"), nb::arg("normalizers"), nb::arg("dtype"), nb::arg("mantissa_bits"), nb::arg("block"),
        nb::arg("reference"), nb::arg("first"), nb::arg("last"), nb::arg("address"), nb::arg("nbytes"), nb::arg("threads"), nb::arg("path"));
  m.def("decode_fixed", &decode_fixed_to_address, nb::arg("payload"), nb::arg("size"), nb::arg("rows"), nb::arg("columns"), nb::arg("out"),
        nb::arg("threads"), nb::arg("path") = "auto");
  m.def("exponents", &exponents_at_address, nb::arg("weights"), nb::arg("count"), nb::arg("threads"));
  m.def("encode_fixed", &encode_fixed_to_address, nb::arg("weights"), nb::arg("rows"), nb::arg("columns"), nb::arg("base"), nb::arg("escapes"),
        nb::arg("payload"), nb::arg("size"), nb::arg("threads"), nb::arg("path") = "auto");
  m.def(
      "multiplies_in_blocks", [](const std::string& path) { return products_by_name(path).multiply_in_blocks != nullptr; }, nb::arg("path") = "auto");
  m.def("multiply", &multiply_at_addresses, nb::arg("weights"), nb::arg("size"), nb::arg("rows"), nb::arg("columns"), nb::arg("x"), nb::arg("inputs"),
        nb::arg("bias"), nb::arg("kind"), nb::arg("width"), nb::arg("y"), nb::arg("stride"), nb::arg("threads"), nb::arg("path") = "auto");
  m.def("multiply_blob", &multiply_blob, nb::arg("blob"), nb::arg("rows"), nb::arg("columns"), nb::arg("x"), nb::arg("inputs"), nb::arg("bias"),
        nb::arg("kind"), nb::arg("width"), nb::arg("y"), nb::arg("stride"), nb::arg("threads"), nb::arg("check"), nb::arg("path") = "auto");
  m.def(
      "check_of",
      [](nb::handle bytes) {
        Buffer in(bytes, false);
        nb::gil_scoped_release release;
        return check_of(*usable_kernels().front(), in.data(), in.size());
      },
      nb::arg("bytes"));
  m.def("pooled_array", &pooled_array, nb::arg("size"));
  nb::class_<Decoding>(m, "Decoding").def("result", &Decoding::result).def("cancel", &Decoding::cancel);
  nb::class_<DecodeQueue>(m, "DecodeQueue")
      .def(nb::init<>())
      .def("add", [](DecodeQueue& queue, nb::handle blob) { return queue.add(blob); }, nb::arg("blob"), nb::keep_alive<0, 2>())
      .def("add_words", &DecodeQueue::add_words, nb::arg("words"), nb::arg("normalizers"), nb::arg("dtype"), nb::arg("mantissa_bits"), nb::arg("block"),
           nb::arg("reference"), nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>())
      .def("close", &DecodeQueue::close);
  m.def("product_paths", [] {
    nb::list names;
    for (const Products* set : usable_products()) names.append(set->name);
    return names;
  });
  m.def("paths", [] {
    nb::list names;
    for (const Kernels* k : usable_kernels()) names.append(k->name);
    return names;
  });
  m.def(
      "trim_pool",
      [](size_t keep) {
        buffer_pool::trim(keep);
        trim_working_memory();
      },
      nb::arg("keep"));
  m.def("idle_bytes", &buffer_pool::idle_bytes);
}
