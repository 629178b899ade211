// The KV cache. bittern/_kv_cache.py makes the class that users see from this one.
#include "bittern/kv_cache.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding.h"
#include "plan/any_op.h"
#include "plan/fields.h"
#include "plan/names.h"
#include "tensor.h"

namespace bittern {
namespace {

constexpr const char* kName = "KvCache";

std::string where(std::string_view operand) {
  return std::string(kName).append(": ").append(operand);
}

// "k.bits" is the keyword k_bits, and "k.codebook.levels" a part of the keyword k_codebook.
std::string keyword(std::string_view field) {
  std::string text(field);
  if (text.size() > 1 && text[1] == '.') text[1] = '_';
  if (const std::size_t dot = text.find('.'); dot != std::string::npos) text.replace(dot, 1, ": ");
  return text;
}

// What C++ says, with the names that Python has.
Status in_python(const Status& status) {
  if (status.ok()) return status;
  std::string text(status.message());
  for (const std::string_view prefix : {"kv_cache: ", "aura_append: ", "aura_attention: "})
    if (text.starts_with(prefix)) text.replace(0, prefix.size() - 2, kName);
  KvCacheConfig config;
  const auto rename = [&](std::string_view field, const auto&, const char*) {
    if (field.find('.') == std::string_view::npos) return;
    for (std::size_t at = 0; (at = text.find(field, at)) != std::string::npos;) {
      const std::string name = keyword(field);
      text.replace(at, field.size(), name);
      at += name.size();
    }
  };
  visit_kv_fields(config, rename);
  visit_kv_tables(config, rename);
  if (text.find(": dtype f64, expected f32") != std::string::npos)
    text += "; numpy's default is float64: pass float32";
  return {status.code(), std::move(text)};
}

template <class T>
T checked_here(Result<T> result) {
  check(in_python(result.status()));
  return std::move(*result);
}

MutView to_operand(const char* operand, const Tensor& tensor, DType dtype, const char* axes) {
  if (tensor.shape.size() > kMaxRank) {
    check(invalid(where(operand) + ": " + std::to_string(tensor.shape.size()) + " axes, expected " +
                  axes));
  }
  return to_view(where(operand), tensor, Operand{dtype, {}});
}

// Tokens' rows [tokens, heads, dim]; [heads, dim] are those of one.
MutView to_rows(const char* operand, const Tensor& tensor) {
  if (!tensor.dtype) {
    check(invalid(where(operand) + ": dtype " + tensor.dtype_name + ", expected f32, f16 or bf16"));
  }
  MutView view = to_operand(operand, tensor, DType::f32, "[tokens,heads,dim]");
  if (view.shape.rank == 2) {
    view.shape = {1, view.shape[0], view.shape[1]};
    view.stride = {0, view.stride[0], view.stride[1]};
  }
  return view;
}

// A small array of any strides, copied to f32.
std::vector<float> to_floats(const std::string& name, nb::handle array,
                             const std::vector<std::int64_t>& shape) {
  const Tensor tensor = import_tensor(where(name), array, false, 0);
  const bool any = shape.empty();  // one axis of any length
  const auto text = [](const std::vector<std::int64_t>& s) {
    std::string t;
    for (const std::int64_t n : s) t.append(t.empty() ? "[" : ",").append(std::to_string(n));
    return t.empty() ? std::string("[]") : t + "]";
  };
  if (any ? tensor.shape.size() != 1 || tensor.shape[0] > 1 << 16 : tensor.shape != shape) {
    check(invalid(where(name) + ": shape " + text(tensor.shape) + ", expected " +
                  (any ? "[levels]" : text(shape))));
  }
  if (tensor.device != Device{})
    check(invalid(where(name) + ": on " + bittern::name(tensor.device) + ", expected cpu"));
  if (!tensor.dtype || (*tensor.dtype != DType::f32 && !is_half(*tensor.dtype))) {
    check(in_python(
        invalid(where(name) + ": dtype " + tensor.dtype_name + ", expected f32, f16 or bf16")));
  }
  std::int64_t count = 1;
  for (const std::int64_t n : tensor.shape) count *= n;
  std::vector<float> values(static_cast<std::size_t>(count));
  const auto size = static_cast<std::int64_t>(size_of(*tensor.dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t offset = 0, rest = i;
    for (std::size_t axis = tensor.shape.size(); axis-- > 0; rest /= tensor.shape[axis])
      offset += rest % tensor.shape[axis] * tensor.stride[axis];
    const auto* from = static_cast<const std::byte*>(tensor.data) + offset * size;
    (void)visit<float, f16, bf16>(*tensor.dtype, [&]<class X>(Type<X>) {
      X x;
      std::memcpy(&x, from, sizeof x);
      values[static_cast<std::size_t>(i)] = to_math(x);
      return Status();
    });
  }
  return values;
}

template <class T>
void set_member(const char* field, T& member, nb::handle value) {
  const auto assign = [&](const auto& x) {
    if (Status s = assign_field(field, member, x); !s.ok())
      check(in_python(invalid(std::string("kv_cache: ").append(s.message()))));
  };
  if (nb::isinstance<nb::str>(value)) {
    const auto text = nb::cast<std::string_view>(value);
    if constexpr (kIsNamed<T>) {
      const auto names = field_names<T>();
      if (std::find(names.begin(), names.end(), text) == names.end()) {
        check(invalid(where(keyword(field)) + ": " + std::string(text.empty() ? "empty" : text) +
                      ", expected " + either(names)));
      }
    }
    assign(text);
    return;
  }
  std::int64_t integer = 0;
  if constexpr (std::is_same_v<T, std::uint64_t>) {
    if (nb::try_cast(value, member, false)) return;
  }
  if (!nb::try_cast(value, integer, true)) {
    check(invalid(where(keyword(field)) + ": " + nb::repr(value).c_str() +
                  ", expected a 64-bit integer"));
  }
  assign(integer);
}

// `given` has keywords that bittern/_kv_cache.py has checked. A codebook is None, its levels, or
// (levels, boundaries), where boundaries may be None: for decoding only.
KvCacheConfig to_config(const nb::dict& given) {
  KvCacheConfig config;
  visit_kv_fields(config, [&](const char* field, auto& member, const char*) {
    const std::string name = keyword(field);
    if (given.contains(name.c_str())) set_member(field, member, given[name.c_str()]);
  });
  const auto take = [&](const std::string& name) -> nb::object {
    if (!given.contains(name.c_str())) return nb::none();
    return nb::borrow(given[name.c_str()]);
  };
  const std::int64_t dim = config.dim;
  for (const auto& [name, side] : {std::pair{std::string("k"), &config.k}, {"v", &config.v}}) {
    if (const nb::object mean = take(name + "_mean"); !mean.is_none())
      side->mean = to_floats(name + "_mean", mean, {config.kv_heads, dim});
    if (const nb::object table = take(name + "_table"); !table.is_none()) {
      if (side->rotation == Rotation::identity) {
        check(invalid(where(name) + "_table: given, but read only with a hadamard or dense "
                                    "rotation; leave it out"));
      }
      side->table =
          to_floats(name + "_table", table,
                    side->rotation == Rotation::dense ? std::vector<std::int64_t>{dim, dim}
                                                      : std::vector<std::int64_t>{dim});
    }
    const nb::object book = take(name + "_codebook");
    if (book.is_none()) continue;
    const std::string where_book = name + "_codebook";
    if (!nb::isinstance<nb::tuple>(book) && !nb::isinstance<nb::list>(book)) {
      auto made = user_codebook(to_floats(where_book, book, {}));
      if (!made) {
        std::string_view text = made.status().message();
        text.remove_prefix(std::string_view("user_codebook: ").size());
        check({made.status().code(), where(where_book) + ": " + std::string(text)});
      }
      side->codebook = std::move(*made);
      continue;
    }
    const nb::object parts = nb::borrow(book);
    if (nb::len(parts) != 2) {
      check(invalid(where(where_book) + ": " + std::to_string(nb::len(parts)) +
                    " arrays, expected levels, or (levels, boundaries)"));
    }
    side->codebook.levels = to_floats(where_book + ": levels", parts[0], {});
    if (side->codebook.levels.empty()) check(invalid(where(where_book) + ": levels: none"));
    if (const nb::object boundaries = parts[1]; !boundaries.is_none())
      side->codebook.boundaries = to_floats(where_book + ": boundaries", boundaries, {});
    side->codebook.distortion = std::numeric_limits<double>::quiet_NaN();
  }
  return config;
}

KvAttention to_attention(double scale, double softcap, bool causal, std::string_view preference) {
  KvAttention how{.scale = scale, .softcap = softcap, .causal = causal};
  if (preference == "fastest") {
    how.preference = Preference::fastest;
  } else if (preference != "exact") {
    check(invalid(where("preference") + ": " + std::string(preference) +
                  ", expected exact or fastest"));
  }
  return how;
}

// A cache and its forks share pages, and with them a lock: a thread that calls in while another
// does waits for it. The lock is never waited for with the GIL held, but by the destructor, and no
// Python is called with the lock held.
class PyKvCache {
 public:
  explicit PyKvCache(KvCache cache,
                     std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>())
      : mutex_(std::move(mutex)), cache_(std::move(cache)) {}
  PyKvCache(PyKvCache&&) = default;
  ~PyKvCache() {
    if (mutex_ == nullptr) return;  // moved from
    const std::lock_guard lock(*mutex_);
    cache_.reset();
  }

  const KvCacheConfig& config() const { return cache_->config(); }  // never changes
  Device device() const { return cache_->device(); }                // nor does this

  // f(cache) with the lock and without the GIL.
  template <class F>
  auto locked(F&& f) {
    const nb::gil_scoped_release unlocked;
    const std::lock_guard lock(*mutex_);
    return f(*cache_);
  }

  // The same, with work on a CUDA device put on `stream`.
  template <class F>
  auto locked_on(std::uintptr_t stream, F&& f) {
    return locked([&](KvCache& c) {
      c.set_stream({reinterpret_cast<void*>(stream)});
      return f(c);
    });
  }

  void append(nb::handle k, nb::handle v, std::uintptr_t stream) {
    const Tensor k_tensor = import_tensor(where("k"), k, false, stream);
    const Tensor v_tensor = import_tensor(where("v"), v, false, stream);
    const MutView k_rows = to_rows("k", k_tensor), v_rows = to_rows("v", v_tensor);
    check_strides(
        in_python(locked_on(stream, [&](KvCache& c) { return c.append(k_rows, v_rows); })));
  }

  void truncate(std::int64_t size) {
    check(in_python(locked([&](KvCache& c) { return c.truncate(size); })));
  }

  // Raises what attend would raise about q.
  void check_query(const Tensor& q) {
    const MutView rows = to_rows("q", q);
    check_strides(in_python(locked([&](KvCache& c) { return c.check_query(rows); })));
  }

  void attend(const Tensor& q, nb::handle out, nb::handle sinks, double scale, double softcap,
              bool causal, std::string_view preference, std::uintptr_t stream) {
    KvAttention how = to_attention(scale, softcap, causal, preference);
    const Tensor out_tensor = import_tensor(where("out"), out, true, stream);
    const MutView q_rows = to_rows("q", q), out_rows = to_rows("out", out_tensor);
    Tensor sinks_tensor;
    if (!sinks.is_none()) {
      sinks_tensor = import_tensor(where("sinks"), sinks, false, stream);
      how.sinks = to_operand("sinks", sinks_tensor, DType::f32, "[heads]");
    }
    check_strides(
        in_python(locked_on(stream, [&](KvCache& c) { return c.attend(q_rows, out_rows, how); })));
    count_write(out_tensor);
  }

  PyKvCache fork() {
    auto made = locked([](KvCache& c) -> Result<KvCache> { return c.fork(); });
    return PyKvCache(checked_here(std::move(made)), mutex_);
  }

  PyKvCache to(std::string_view device) {
    const Device target = parse_device(kName, device);
    auto made = locked([&](KvCache& c) -> Result<KvCache> { return c.to(target); });
    return PyKvCache(checked_here(std::move(made)));
  }

  nb::tuple read(std::int64_t token) {
    const std::int64_t heads = config().kv_heads, dim = config().dim;
    std::vector<float> k(static_cast<std::size_t>(heads * dim)), v(k.size());
    check(in_python(locked([&](KvCache& c) { return c.read(token, k, v); })));
    const std::vector<std::size_t> shape{static_cast<std::size_t>(heads),
                                         static_cast<std::size_t>(dim)};
    return nb::make_tuple(to_numpy(std::move(k), shape), to_numpy(std::move(v), shape));
  }

  std::int64_t size() {
    return locked([](KvCache& c) { return c.size(); });
  }
  nb::tuple counts() {
    return to_tuple(locked([](KvCache& c) {
      return std::vector<std::int64_t>{c.first(), c.coded(), c.recent(), c.forgotten()};
    }));
  }
  nb::tuple bytes() {
    const KvCacheBytes b = locked([](KvCache& c) { return c.bytes(); });
    return nb::make_tuple(b.codes, b.scales, b.exact, b.pages, b.shared, b.regions, b.tables);
  }

  nb::object serialize() {
    for (std::size_t size = 0;;) {
      const auto bytes =
          nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
      if (!bytes.is_valid()) throw nb::python_error();
      const std::span to(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr())), size);
      Status status;
      // Another thread may change the cache while its bytes are allocated.
      const std::size_t needed = locked([&](KvCache& c) {
        const std::size_t n = c.serialized_bytes();
        if (n == to.size()) status = c.serialize(to);
        return n;
      });
      check(in_python(status));
      if (needed == size) return bytes;
      size = needed;
    }
  }

  void write_aura(nb::handle k_packed, nb::handle k_scales, nb::handle v_packed,
                  nb::handle v_scales) {
    std::vector<Tensor> tensors;
    const KvCache::AuraViews views =
        aura_views(k_packed, k_scales, v_packed, v_scales, true, tensors);
    check_strides(in_python(locked([&](KvCache& c) { return c.write_aura(views); })));
    for (const Tensor& tensor : tensors) count_write(tensor);
  }

  static KvCache::AuraViews aura_views(nb::handle k_packed, nb::handle k_scales,
                                       nb::handle v_packed, nb::handle v_scales, bool output,
                                       std::vector<Tensor>& tensors) {
    const auto view = [&](const char* name, nb::handle array, DType dtype) {
      tensors.push_back(import_tensor(where(name), array, output, 0));
      return to_operand(name, tensors.back(), dtype,
                        dtype == DType::u32 ? "[kv_heads,capacity,width]" : "[kv_heads,capacity]");
    };
    KvCache::AuraViews views;
    views.k_packed = view("k_packed", k_packed, DType::u32);
    views.k_scales = view("k_scales", k_scales, DType::f32);
    views.v_packed = view("v_packed", v_packed, DType::u32);
    views.v_scales = view("v_scales", v_scales, DType::f32);
    return views;
  }

 private:
  std::shared_ptr<std::mutex> mutex_;
  std::optional<KvCache> cache_;
};

PyKvCache parse(nb::handle object) {
  struct Buffer {
    Py_buffer view{};
    ~Buffer() {
      if (view.obj != nullptr) PyBuffer_Release(&view);
    }
  } buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer.view, PyBUF_SIMPLE) != 0) {
    if (PyErr_ExceptionMatches(PyExc_MemoryError) != 0) throw nb::python_error();
    PyErr_Clear();
    check(invalid(where("bytes") + ": " + Py_TYPE(object.ptr())->tp_name +
                  ", expected bytes, or a contiguous array of them"));
  }
  auto made = [&] {
    const nb::gil_scoped_release unlocked;
    return KvCache::parse({static_cast<const std::byte*>(buffer.view.buf),
                           static_cast<std::size_t>(buffer.view.len)});
  }();
  return PyKvCache(checked_here(std::move(made)));
}

KvCache make(const KvCacheConfig& config, Device device) {
  auto made = [&] {
    const nb::gil_scoped_release unlocked;
    return KvCache::make(config, device);
  }();
  return checked_here(std::move(made));
}

// The keywords, in order, as fields.
std::vector<FieldInfo> config_fields() {
  static std::deque<std::string> names;  // live as long as the module
  static const std::vector<FieldInfo> fields = [] {
    std::vector<FieldInfo> all;
    const KvCacheConfig defaults;
    visit_kv_fields(defaults, [&](const char* field, const auto& member, const char* help) {
      using T = std::remove_cvref_t<decltype(member)>;
      const auto choices = field_names<T>();
      FieldInfo info{names.emplace_back(keyword(field)), help, {choices.begin(), choices.end()}};
      info.default_value = static_cast<std::int64_t>(member);
      all.push_back(std::move(info));
    });
    return all;
  }();
  return fields;
}

template <class T>
nb::object to_python(const T& member) {
  if constexpr (std::is_same_v<T, bool>) {
    return nb::bool_(member);
  } else if constexpr (kIsNamed<T>) {
    const std::string_view text = field_names<T>()[static_cast<std::size_t>(member)];
    return nb::str(text.data(), text.size());
  } else {
    return nb::int_(member);
  }
}

// All that makes an equal cache: the keywords and their values.
nb::dict config_of(const KvCacheConfig& config) {
  nb::dict all;
  visit_kv_fields(config, [&](const char* field, const auto& member, const char*) {
    all[keyword(field).c_str()] = to_python(member);
  });
  const auto heads = static_cast<std::size_t>(config.kv_heads),
             dim = static_cast<std::size_t>(config.dim);
  const auto array = [](const std::vector<float>& values, const std::vector<std::size_t>& shape) {
    return values.empty() ? nb::object(nb::none()) : to_numpy(values, shape);
  };
  for (const auto& [name, side] : {std::pair{std::string("k"), &config.k}, {"v", &config.v}}) {
    const auto& [levels, boundaries, distortion] = side->codebook;
    all[(name + "_codebook").c_str()] =
        levels.empty() ? nb::object(nb::none())
                       : nb::make_tuple(array(levels, {levels.size()}),
                                        array(boundaries, {boundaries.size()}));
    all[(name + "_table").c_str()] =
        array(side->table, side->rotation == Rotation::dense ? std::vector<std::size_t>{dim, dim}
                                                             : std::vector<std::size_t>{dim});
    all[(name + "_mean").c_str()] = array(side->mean, {heads, dim});
  }
  return all;
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  m.def("kv_fields", [] { return nb::tuple(nb::cast(config_fields())); });
  m.def(
      "aura_config",
      [](std::string_view scheme, std::int64_t kv_heads, std::int64_t dim, std::uint64_t layer,
         bool legacy) {
        const AuraScheme widths = checked(parse_aura_name(scheme));
        return config_of(checked(aura_config(widths, kv_heads, dim, layer, legacy)));
      },
      nb::arg("scheme"), nb::arg("kv_heads"), nb::arg("dim"), nb::arg("layer"), nb::arg("legacy"));

  nb::class_<PyKvCache>(m, "KvCache")
      .def("__init__",
           [](PyKvCache* self, const nb::dict& given, std::string_view device) {
             new (self) PyKvCache(make(to_config(given), parse_device(kName, device)));
           })
      .def_static("parse", parse, nb::arg("data").none())
      .def_static(
          "read_aura",
          [](const nb::dict& given, nb::handle k_packed, nb::handle k_scales, nb::handle v_packed,
             nb::handle v_scales, std::int64_t tokens) {
            const KvCacheConfig config = to_config(given);
            std::vector<Tensor> tensors;
            const KvCache::AuraViews views =
                PyKvCache::aura_views(k_packed, k_scales, v_packed, v_scales, false, tensors);
            auto made = [&] {
              const nb::gil_scoped_release unlocked;
              return KvCache::read_aura(config, views, tokens);
            }();
            check_strides(in_python(made.status()));
            return PyKvCache(std::move(*made));
          },
          nb::arg("config"), nb::arg("k_packed").none(), nb::arg("k_scales").none(),
          nb::arg("v_packed").none(), nb::arg("v_scales").none(), nb::arg("tokens"))
      .def("append", &PyKvCache::append, nb::arg("k").none(), nb::arg("v").none(),
           nb::arg("stream"))
      .def("truncate", &PyKvCache::truncate)
      .def("check_query", &PyKvCache::check_query)
      .def("attend", &PyKvCache::attend, nb::arg("q"), nb::arg("out").none(),
           nb::arg("sinks").none(), nb::arg("scale"), nb::arg("softcap"), nb::arg("causal"),
           nb::arg("preference"), nb::arg("stream"))
      .def("fork", &PyKvCache::fork)
      .def("to", &PyKvCache::to)
      .def_prop_ro("device", [](const PyKvCache& c) { return name(c.device()); })
      .def("read", &PyKvCache::read)
      .def("__len__", &PyKvCache::size)
      .def("counts", &PyKvCache::counts)
      .def("bytes", &PyKvCache::bytes)
      .def("serialize", &PyKvCache::serialize)
      .def("write_aura", &PyKvCache::write_aura, nb::arg("k_packed").none(),
           nb::arg("k_scales").none(), nb::arg("v_packed").none(), nb::arg("v_scales").none())
      .def("config", [](const PyKvCache& c) { return config_of(c.config()); });
}

}  // namespace bittern
