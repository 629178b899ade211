// quantize_model, inspect_model and compare_models. bittern/_convert.py checks what it is given and
// makes classes of the dictionaries that come back. Texts come as bytes, since neither paths nor
// names in model files need be UTF-8.
#include "bittern/convert.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "binding.h"
#include "bittern/distill.h"

namespace bittern {
namespace {

std::string text_of(nb::handle value) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(value.ptr(), &data, &size) != 0) throw nb::python_error();
  return {data, static_cast<std::size_t>(size)};
}

nb::object decoded(std::string_view text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

nb::object path_object(std::string_view path) {
  return nb::steal(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

// ---- what was given: the keys that are there ----

void take(nb::handle value, std::string& to) { to = text_of(value); }
template <class T>
  requires std::is_arithmetic_v<T>
void take(nb::handle value, T& to) {
  to = nb::cast<T>(value);
}
template <class T>
void take(nb::handle value, std::optional<T>& to) {
  if constexpr (std::is_same_v<T, std::string>) {
    to = text_of(value);
  } else {
    to = nb::cast<T>(value);
  }
}

template <class T>
void take(const nb::dict& given, const char* key, T& to) {
  if (given.contains(key)) take(given[key], to);
}

QuantizeRule rule_of(const nb::dict& given) {
  QuantizeRule rule;
  take(given, "match", rule.match);
  take(given, "keep", rule.keep);
  take(given, "bits", rule.bits);
  take(given, "group_size", rule.group_size);
  take(given, "type", rule.type);
  return rule;
}

QuantizeOptions options_of(const nb::dict& given) {
  QuantizeOptions o;
  take(given, "bits", o.bits);
  take(given, "group_size", o.group_size);
  take(given, "method", o.method);
  take(given, "data", o.data);
  take(given, "pieces", o.pieces);
  take(given, "context", o.context);
  take(given, "fisher", o.fisher);
  take(given, "format", o.format);
  take(given, "zero_points", o.zero_points);
  take(given, "type", o.type);
  take(given, "output_tensor_type", o.output_tensor_type);
  take(given, "token_embedding_type", o.token_embedding_type);
  take(given, "leave_output_tensor", o.leave_output_tensor);
  take(given, "target_bpw", o.target_bpw);
  take(given, "policy", o.policy);
  take(given, "imatrix", o.imatrix);
  take(given, "transcode", o.transcode);
  take(given, "lossy", o.lossy);
  take(given, "dequantize", o.dequantize);
  take(given, "dtype", o.dtype);
  take(given, "scale_dtype", o.scale_dtype);
  take(given, "pure", o.pure);
  take(given, "allow_requantize", o.allow_requantize);
  take(given, "quantize", o.quantize);
  take(given, "split_max_size", o.split_max_size);
  take(given, "split_max_tensors", o.split_max_tensors);
  take(given, "force", o.force);
  take(given, "resume", o.resume);
  take(given, "dry_run", o.dry_run);
  take(given, "threads", o.threads);
  if (given.contains("rules"))
    for (const nb::handle rule : given["rules"])
      o.rules.push_back(rule_of(nb::cast<nb::dict>(rule)));
  return o;
}

DistillOptions distill_options_of(const nb::dict& given) {
  DistillOptions o;
  take(given, "format", o.format);
  take(given, "zero_points", o.zero_points);
  take(given, "type", o.type);
  take(given, "bits", o.bits);
  take(given, "group_size", o.group_size);
  take(given, "embedding_bits", o.embedding_bits);
  take(given, "scale_dtype", o.scale_dtype);
  take(given, "self_text", o.self_text);
  take(given, "context", o.context);
  take(given, "calibration", o.calibration);
  take(given, "fisher", o.fisher);
  take(given, "teacher_cache", o.teacher_cache);
  take(given, "teacher_top", o.teacher_top);
  take(given, "learn_codes", o.learn_codes);
  take(given, "validation", o.validation);
  take(given, "steps", o.steps);
  take(given, "batch", o.batch);
  take(given, "rate", o.rate);
  take(given, "seed", o.seed);
  if (given.contains("preference") && nb::cast<bool>(given["preference"]))
    o.preference = Preference::fastest;
  take(given, "force", o.force);
  take(given, "resume", o.resume);
  take(given, "checkpoint_minutes", o.checkpoint_minutes);
  take(given, "threads", o.threads);
  for (const nb::handle text : given["data"]) o.data.push_back(text_of(text));
  if (given.contains("rules"))
    for (const nb::handle rule : given["rules"])
      o.rules.push_back(rule_of(nb::cast<nb::dict>(rule)));
  return o;
}

// ---- calls ----

// The caller's function, on the caller's thread while it has released the GIL. What it raises ends
// the call, and so does Ctrl-C, also where there is no function.
class Callback {
 public:
  explicit Callback(nb::object function) : function_(std::move(function)) {}

  bool operator()(const ModelProgress& state) {
    return ask(true, false, [&] {
      return nb::cast<bool>(
          function_(decoded(state.doing), decoded(state.tensor), state.done, state.total));
    });
  }
  DistillNext operator()(const DistillProgress& state) {
    return ask(DistillNext::go_on, DistillNext::stop, [&] {
      return static_cast<DistillNext>(nb::cast<int>(function_(
          decoded(state.doing), decoded(state.text), state.share, state.step, state.steps,
          state.train_kl, state.validation_kl, state.tokens_per_second, state.seconds_left)));
    });
  }

  // With the GIL held again.
  void rethrow() {
    if (raised_) throw nb::python_error(std::move(*raised_));
  }

 private:
  template <class T, class F>
  T ask(T without, T raised, const F& f) {
    const nb::gil_scoped_acquire locked;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      return function_.is_none() ? without : f();
    } catch (nb::python_error& error) {
      raised_ = std::make_unique<nb::python_error>(std::move(error));
      return raised;
    }
  }

  nb::object function_;
  std::unique_ptr<nb::python_error> raised_;
};

void raise(nb::handle type, const Status& status) {
  PyErr_SetObject(type.ptr(), decoded(status.message()).ptr());
  throw nb::python_error();
}

// Runs f() without the GIL.
template <class F>
auto run(Callback& callback, const F& f) {
  // A file that shrinks must not end the interpreter.
  guard_mapped_files();
  auto result = [&] {
    const nb::gil_scoped_release unlocked;
    return f();
  }();
  callback.rethrow();
  const Status& status = result.status();
  if (status.code() == Code::cancelled)
    raise(nb::module_::import_("bittern._convert").attr("Cancelled"), status);
  if (status.code() == Code::unavailable || status.code() == Code::io_error)
    raise(PyExc_OSError, status);
  return checked(std::move(result));
}

// ---- what comes back ----

nb::object object(const std::string& text) { return decoded(text); }
nb::object object(std::uint64_t number) { return nb::int_(number); }
nb::object object(std::int64_t number) { return nb::int_(number); }
nb::object object(double number) { return nb::float_(number); }
nb::object object(bool value) { return nb::bool_(value); }
nb::object object(const QuantizedTensor& tensor);
nb::object object(const TensorDescription& tensor);
nb::object object(const StorageTotal& total);
nb::object object(const TensorDifference& tensor);
nb::object object(const DistillTrial& trial);
nb::object object(const DistillPoint& point);
nb::object object(const ModelComparison::Shapes& shapes);
nb::object object(const ModelComparison::Skipped& skipped);
template <class T>
nb::object object(const std::optional<T>& value) {
  return value ? object(*value) : nb::none();
}
template <class T>
nb::object object(const std::vector<T>& values) {
  nb::list list;
  for (const T& value : values) list.append(object(value));
  return list;
}

nb::list paths(const std::vector<std::string>& values) {
  nb::list list;
  for (const std::string& value : values) list.append(path_object(value));
  return list;
}

template <class T>
nb::object shape_object(const std::vector<T>& shape) {
  return nb::tuple(object(shape));
}

nb::object object(const QuantizedTensor& tensor) {
  nb::dict d;
  d["name"] = object(tensor.name);
  d["shape"] = shape_object(tensor.shape);
  d["sources"] = object(tensor.sources);
  d["from_storage"] = object(tensor.from);
  d["to_storage"] = object(tensor.to);
  d["way"] = object(tensor.way);
  d["bytes"] = object(tensor.bytes);
  d["note"] = object(tensor.note);
  return d;
}

nb::dict report_dict(const QuantizeReport& report) {
  nb::dict d;
  d["model"] = path_object(report.model);
  d["output"] = path_object(report.output);
  d["format"] = object(report.format);
  d["outputs"] = paths(report.outputs);
  d["dry_run"] = object(report.dry_run);
  d["weights"] = object(report.weights);
  d["bytes"] = object(report.bytes);
  d["bits_per_weight"] = object(report.bits_per_weight);
  d["seconds"] = object(report.seconds);
  d["seconds_making"] = object(report.seconds_making);
  d["seconds_writing"] = object(report.seconds_writing);
  d["seconds_syncing"] = object(report.seconds_syncing);
  d["resumed"] = object(std::uint64_t{report.resumed});
  d["scale_change"] = object(report.scale_change);
  d["saturated"] = object(report.saturated);
  d["notes"] = object(report.notes);
  d["tensors"] = object(report.tensors);
  return d;
}

nb::object object(const DistillTrial& trial) {
  return nb::make_tuple(trial.rate, trial.validation_kl);
}

nb::object object(const DistillPoint& point) {
  return nb::make_tuple(point.step, point.train_kl, point.validation_kl);
}

nb::dict report_dict(const DistillReport& report) {
  nb::dict d;
  d["output"] = report_dict(report.output);
  d["type"] = report.type.empty() ? nb::none() : object(report.type);
  d["bits"] = object(std::int64_t{report.bits});
  d["group_size"] = object(std::int64_t{report.group_size});
  d["learned"] = object(report.learned);
  d["codes"] = object(report.codes);
  d["codes_moved"] = object(report.codes_moved);
  d["train_pieces"] = object(report.train_pieces);
  d["validation_pieces"] = object(report.validation_pieces);
  d["steps"] = object(report.steps);
  d["best_step"] = object(report.best_step);
  d["finished_early"] = object(report.finished_early);
  d["rate"] = object(report.rate);
  d["start_kl"] = object(report.start_kl);
  d["kl"] = object(report.kl);
  d["written_kl"] = object(report.written_kl);
  d["written_start_kl"] = object(report.written_start_kl);
  d["start_written"] = object(report.start_written);
  d["trials"] = object(report.trials);
  d["points"] = object(report.points);
  d["seconds"] = object(report.seconds);
  d["seconds_learning"] = object(report.seconds_learning);
  d["peak_bytes"] = object(report.peak_bytes);
  d["tokens_per_second"] = object(report.tokens_per_second);
  return d;
}

nb::object object(const TensorDescription& tensor) {
  nb::dict d;
  d["name"] = object(tensor.name);
  d["shape"] = shape_object(tensor.shape);
  d["storage"] = object(tensor.storage);
  d["parameters"] = object(tensor.parameters);
  d["bytes"] = object(tensor.bytes);
  d["decodable"] = object(tensor.decodable);
  return d;
}

nb::object object(const StorageTotal& total) {
  nb::dict d;
  d["storage"] = object(total.storage);
  d["tensors"] = object(total.tensors);
  d["parameters"] = object(total.parameters);
  d["bytes"] = object(total.bytes);
  return d;
}

nb::dict description_dict(const ModelDescription& model) {
  nb::dict d;
  d["path"] = path_object(model.path);
  d["kind"] = object(model.kind);
  d["form"] = object(model.form);
  d["files"] = paths(model.files);
  d["architecture"] = object(model.architecture);
  d["model_class"] = object(model.model_class);
  d["name"] = object(model.name);
  d["layers"] = object(model.layers);
  d["hidden_size"] = object(model.hidden_size);
  d["heads"] = object(model.heads);
  d["key_value_heads"] = object(model.key_value_heads);
  d["experts"] = object(model.experts);
  d["vocabulary"] = object(model.vocabulary);
  d["context"] = object(model.context);
  d["quantization"] = object(model.quantization);
  d["quantization_json"] = object(model.quantization_json);
  d["parameters"] = object(model.parameters());
  d["bytes"] = object(model.bytes());
  d["bits_per_weight"] = object(model.bits_per_weight());
  d["storages"] = object(model.storages);
  d["notes"] = object(model.notes);
  d["tensors"] = object(model.tensors);
  return d;
}

nb::object object(const TensorDifference& tensor) {
  nb::dict d;
  d["name"] = object(tensor.name);
  d["shape"] = shape_object(tensor.shape);
  d["storage"] = object(tensor.storage);
  d["other_storage"] = object(tensor.other_storage);
  d["relative_error"] = object(tensor.relative_error());
  d["max_abs_error"] = object(tensor.max_abs_error);
  d["different"] = object(tensor.different);
  d["not_finite"] = object(tensor.not_finite);
  d["not_finite_in_model"] = object(tensor.not_finite_in_model);
  d["not_finite_in_other"] = object(tensor.not_finite_in_other);
  return d;
}

nb::object object(const ModelComparison::Shapes& shapes) {
  return nb::make_tuple(object(shapes.name), shape_object(shapes.shape),
                        shape_object(shapes.other_shape));
}

nb::object object(const ModelComparison::Skipped& skipped) {
  return nb::make_tuple(object(skipped.name), object(skipped.reason));
}

nb::dict comparison_dict(const ModelComparison& comparison) {
  nb::list groups, not_finite;
  for (const GroupDifference& group : comparison.worst_groups) {
    nb::dict d;
    d["tensor"] = object(comparison.tensors[group.tensor].name);
    d["row"] = object(group.row);
    d["column"] = object(group.column);
    d["error"] = object(group.error);
    groups.append(d);
  }
  for (const std::size_t i : comparison.not_finite)
    not_finite.append(object(comparison.tensors[i].name));
  nb::dict d;
  d["model"] = description_dict(comparison.model);
  d["other"] = description_dict(comparison.other);
  d["relative_error"] = object(comparison.relative_error());
  d["max_abs_error"] = object(comparison.max_abs_error());
  d["equal"] = object(std::uint64_t{comparison.equal()});
  d["tensors"] = object(comparison.tensors);
  d["worst_groups"] = groups;
  d["only_in_model"] = object(comparison.only_in_model);
  d["only_in_other"] = object(comparison.only_in_other);
  d["shapes_differ"] = object(comparison.shapes_differ);
  d["not_compared"] = object(comparison.not_compared);
  d["not_finite_tensors"] = not_finite;
  return d;
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def(
      "quantize_model",
      [](const nb::bytes& source, const nb::bytes& out, const nb::dict& given,
         nb::object progress) {
        Callback callback(std::move(progress));
        QuantizeOptions options = options_of(given);
        options.progress = [&](const ModelProgress& state) { return callback(state); };
        const std::string from = text_of(source), to = text_of(out);
        return report_dict(run(callback, [&] { return quantize_calibrated(from, to, options); }));
      },
      nb::arg("source"), nb::arg("out"), nb::arg("options"), nb::arg("progress").none());
  m.def(
      "distill_model",
      [](const nb::bytes& teacher, const nb::bytes& out, const nb::dict& given,
         nb::object progress) {
        Callback callback(std::move(progress));
        DistillOptions options = distill_options_of(given);
        options.progress = [&](const DistillProgress& state) { return callback(state); };
        const std::string from = text_of(teacher), to = text_of(out);
        return report_dict(run(callback, [&] { return distill_model(from, to, options); }));
      },
      nb::arg("teacher"), nb::arg("out"), nb::arg("options"), nb::arg("progress").none());
  m.def("inspect_model", [](const nb::bytes& path) {
    Callback callback{nb::none()};
    const std::string from = text_of(path);
    return description_dict(run(callback, [&] { return inspect_model(from); }));
  });
  m.def(
      "compare_models",
      [](const nb::bytes& model, const nb::bytes& other, const nb::dict& given,
         nb::object progress) {
        Callback callback(std::move(progress));
        CompareOptions options;
        take(given, "threads", options.threads);
        if (given.contains("worst_groups"))
          options.worst_groups = nb::cast<std::size_t>(given["worst_groups"]);
        options.progress = [&](const ModelProgress& state) { return callback(state); };
        const std::string a = text_of(model), b = text_of(other);
        return comparison_dict(run(callback, [&] { return compare_models(a, b, options); }));
      },
      nb::arg("model"), nb::arg("other"), nb::arg("options"), nb::arg("progress").none());
}

}  // namespace bittern
