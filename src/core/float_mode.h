// The processor's floating-point modes, as numerics.md has them.
#pragma once

namespace bittern {

// While one lives, this thread rounds to nearest, keeps denormals and traps nothing, whatever mode
// the program chose (torch.set_flush_denormal, -ffast-math, fesetround); then its mode is back. A
// thread starts with the mode of the one that made it, so each thread of a team needs its own.
class [[nodiscard]] FloatMode {
 public:
  FloatMode() : before_(__builtin_ia32_stmxcsr()) {
    if (foreign()) set(kDefault);
  }
  ~FloatMode() {
    if (foreign()) set(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  // MXCSR: the six bits below are flags of what has happened.
  static constexpr unsigned kDefault = 0x1f80, kModes = 0xffc0;
  bool foreign() const { return (before_ & kModes) != kDefault; }
  // A call, which arithmetic is not moved across; rare, so its cost is nothing.
  [[gnu::noinline, gnu::cold]] static void set(unsigned mode) {
    __builtin_ia32_ldmxcsr(mode);
    asm volatile("" ::: "memory");
  }
  const unsigned before_;
};

}  // namespace bittern
