// Errors are values: the library never throws, prints or aborts.
#pragma once
#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace bittern {

enum class Code {
  ok,
  invalid_argument,  // the problem or an operand is not valid
  unsupported,       // valid, but no kernel here does it
  unavailable,       // a device, file or driver is missing
  out_of_memory,
  device_error,
  io_error,
  internal,
  cancelled,  // by the caller, while it ran
};

const char* name(Code code) noexcept;

// A null pointer when ok, so success costs one word. Copies share the message, so nothing here
// throws.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  // Without memory for the message the status is out_of_memory(). Code::ok is ok, without one.
  Status(Code code, std::string_view message) noexcept;
  Status(const Status& other) noexcept : rep_(other.rep_) {
    if (rep_ != nullptr) hold();
  }
  Status(Status&& other) noexcept : rep_(std::exchange(other.rep_, nullptr)) {}
  // Two, not one by value: of `status = {code, text}` clang 14 never destroys a value parameter.
  Status& operator=(const Status& other) noexcept { return *this = Status(other); }
  Status& operator=(Status&& other) noexcept {
    std::swap(rep_, other.rep_);
    return *this;
  }
  ~Status() {
    if (rep_ != nullptr) drop();
  }
  static Status out_of_memory() noexcept;  // needs no memory

  bool ok() const noexcept { return rep_ == nullptr; }
  Code code() const noexcept { return rep_ != nullptr ? rep_->code : Code::ok; }
  std::string_view message() const noexcept {  // lives as long as a copy of this status
    return rep_ != nullptr ? rep_->message : std::string_view();
  }

 private:
  struct Rep {
    Code code;
    std::string_view message;
    std::atomic<std::size_t> holders;  // 0: of all threads, for ever
  };
  static Rep no_memory_;
  void hold() const noexcept;
  void drop() noexcept;
  Rep* rep_ = nullptr;
};

inline Status invalid(std::string_view message) noexcept {
  return {Code::invalid_argument, message};
}
inline Status unsupported(std::string_view message) noexcept {
  return {Code::unsupported, message};
}
inline Status unavailable(std::string_view message) noexcept {
  return {Code::unavailable, message};
}
inline Status internal(std::string_view message) noexcept { return {Code::internal, message}; }

// A value or the reason why there is none: std::expected<T, Status>, which C++20 lacks.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  // An ok status does not say why there is no value: it becomes `internal`.
  Result(Status status) noexcept
      : status_(status.ok() ? internal("a Result of an ok Status, which has no value")
                            : std::move(status)) {}
  explicit operator bool() const { return value_.has_value(); }
  bool ok() const { return value_.has_value(); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  const Status& status() const { return status_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace bittern

// Returns from the enclosing function when `expr` is not ok.
#define BITTERN_TRY(expr) \
  if (::bittern::Status bittern_status_ = (expr); !bittern_status_.ok()) return bittern_status_
