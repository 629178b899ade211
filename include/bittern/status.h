// Errors are values: the library never throws, prints or aborts.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace bittern {

enum class Code {
  ok,
  invalid_argument,  // the caller's problem or operands are malformed
  unsupported,       // well formed, but no kernel here does it
  unavailable,       // a device, file or driver is not there
  out_of_memory,
  device_error,
  io_error,
  internal,
  cancelled,  // by the caller, while it ran
};

const char* name(Code code);

// A null pointer when ok, so success costs one word.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : rep_(std::make_unique<Rep>(Rep{code, std::move(message)})) {}
  Status(const Status& other) : rep_(other.rep_ ? std::make_unique<Rep>(*other.rep_) : nullptr) {}
  Status(Status&&) = default;
  Status& operator=(Status other) {
    rep_ = std::move(other.rep_);
    return *this;
  }
  ~Status() = default;

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::ok; }
  std::string_view message() const {
    return rep_ ? std::string_view(rep_->message) : std::string_view();
  }

 private:
  struct Rep {
    Code code;
    std::string message;
  };
  std::unique_ptr<Rep> rep_;
};

inline Status invalid(std::string message) { return {Code::invalid_argument, std::move(message)}; }
inline Status unsupported(std::string message) { return {Code::unsupported, std::move(message)}; }
inline Status unavailable(std::string message) { return {Code::unavailable, std::move(message)}; }

// A value or the reason why there is none: std::expected<T, Status>, which C++20 lacks.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}
  explicit operator bool() const { return value_.has_value(); }
  bool ok() const { return value_.has_value(); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
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
