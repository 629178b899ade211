// Tokenisers. bittern/_tokenizer.py makes the classes that users see from these, and checks what
// they are given. Texts are bytes on both sides: not all that tokens spell is UTF-8.
#include "bittern/tokenizer.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding.h"
#include "bittern/convert.h"

namespace bittern {
namespace {

using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::string_view view(const nb::bytes& text) { return {text.c_str(), text.size()}; }
nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::object to_numpy(std::vector<std::int32_t> values) {
  auto owned = std::make_unique<std::vector<std::int32_t>>(std::move(values));
  std::int32_t* data = owned->data();
  const std::size_t size = owned->size();
  const nb::capsule owner(
      owned.release(), [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::int32_t>(data, 1, &size, owner));
}

nb::object to_object(std::optional<std::int32_t> id) {
  return id ? nb::object(nb::int_(*id)) : nb::none();
}

// Runs f() without the GIL.
template <class F>
auto unlocked(F&& f) {
  auto result = [&] {
    const nb::gil_scoped_release released;
    return f();
  }();
  return checked(std::move(result));
}

Tokenizer load(const nb::bytes& path) {
  guard_mapped_files();  // a file that shrinks must not end the interpreter
  const std::string from(view(path));
  auto result = [&] {
    const nb::gil_scoped_release released;
    return Tokenizer::load(from);
  }();
  check_file(result.status());
  return std::move(*result);
}

std::vector<ChatMessage> messages_of(const nb::list& messages) {
  std::vector<ChatMessage> all;
  for (const nb::handle message : messages) {
    const auto pair = nb::cast<nb::tuple>(message);
    all.push_back({std::string(view(nb::cast<nb::bytes>(pair[0]))),
                   std::string(view(nb::cast<nb::bytes>(pair[1])))});
  }
  return all;
}

ChatOptions options_of(const nb::dict& given) {
  ChatOptions options;
  if (given.contains("add_generation_prompt"))
    options.add_generation_prompt = nb::cast<bool>(given["add_generation_prompt"]);
  if (given.contains("thinking")) options.thinking = nb::cast<bool>(given["thinking"]);
  if (given.contains("date")) options.date = view(nb::cast<nb::bytes>(given["date"]));
  if (given.contains("format")) options.format = view(nb::cast<nb::bytes>(given["format"]));
  return options;
}

}  // namespace

void bind_tokenizer(nb::module_& m) {
  nb::class_<Tokenizer>(m, "Tokenizer")
      .def("__init__",
           [](Tokenizer* self, const nb::bytes& path) { new (self) Tokenizer(load(path)); })
      .def("encode",
           [](const Tokenizer& t, const nb::bytes& text, bool add_special, bool parse_special) {
             return to_numpy(
                 unlocked([&] { return t.encode(view(text), {add_special, parse_special}); }));
           })
      .def("decode",
           [](const Tokenizer& t, const Ids& ids, bool skip_special) {
             return to_bytes(
                 unlocked([&] { return t.decode({ids.data(), ids.shape(0)}, skip_special); }));
           })
      .def("token",
           [](const Tokenizer& t, std::int32_t id) { return to_bytes(checked(t.token(id))); })
      .def("id",
           [](const Tokenizer& t, const nb::bytes& token) { return to_object(t.id(view(token))); })
      .def("is_special", &Tokenizer::is_special)
      .def("size", &Tokenizer::size)
      .def("bos", [](const Tokenizer& t) { return to_object(t.bos()); })
      .def("eos", [](const Tokenizer& t) { return to_object(t.eos()); })
      .def("ends",
           [](const Tokenizer& t) {
             return to_tuple(std::vector<std::int64_t>(t.ends().begin(), t.ends().end()));
           })
      .def("chat_template", [](const Tokenizer& t) { return to_bytes(t.chat_template()); })
      .def("apply_chat",
           [](const Tokenizer& t, const nb::list& messages, const nb::dict& given) {
             const auto all = messages_of(messages);
             const ChatOptions options = options_of(given);
             return to_numpy(unlocked([&] { return t.apply_chat(all, options); }));
           })
      .def("chat_text", [](const Tokenizer& t, const nb::list& messages, const nb::dict& given) {
        const auto all = messages_of(messages);
        const ChatOptions options = options_of(given);
        return to_bytes(unlocked([&] { return t.chat_text(all, options); }));
      });
  nb::class_<TokenStream>(m, "TokenStream")
      .def(nb::init<Tokenizer, bool>())
      .def("push", [](TokenStream& s, std::int32_t id) { return to_bytes(checked(s.push(id))); })
      .def("finish", [](TokenStream& s) { return to_bytes(s.finish()); });
}

}  // namespace bittern
