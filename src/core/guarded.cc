#include "core/guarded.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iterator>
#include <new>
#include <stdexcept>
#include <system_error>

namespace bittern {
namespace {

// "name: what" in memory of its own; a long name is cut.
Status failed(Code code, std::string_view name, std::string_view what) noexcept {
  char text[512];
  char* to = text;
  const auto add = [&](std::string_view part) {
    const auto room = static_cast<std::size_t>(std::end(text) - to);
    to = std::copy_n(part.begin(), std::min(part.size(), room), to);
  };
  add(name.substr(0, 256));
  if (!name.empty()) add(": ");
  add(what);
  return {code, {text, static_cast<std::size_t>(to - text)}};
}

}  // namespace

Status caught(std::string_view name) noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return failed(Code::out_of_memory, name, "out of memory");
  } catch (const std::length_error&) {  // more than a container can ever hold
    return failed(Code::out_of_memory, name, "out of memory");
  } catch (const std::filesystem::filesystem_error& e) {
    if (e.code() == std::errc::not_enough_memory) return Status::out_of_memory();
    return failed(Code::io_error, name, e.what());
  } catch (const std::system_error& e) {  // a thread or a lock
    if (e.code() == std::errc::not_enough_memory) return Status::out_of_memory();
    return failed(Code::unavailable, name, e.what());
  } catch (const std::exception& e) {
    return failed(Code::internal, name, e.what());
  } catch (...) {
    return failed(Code::internal, name, "unknown exception");
  }
}

}  // namespace bittern
