// The processor's floating-point modes, as numerics.md has them.
#pragma once

namespace bittern {

// As long as the object exists, this thread rounds to nearest, keeps denormals and traps nothing,
// whatever mode the program chose (torch.set_flush_denormal, -ffast-math, fesetround). The
// destructor restores that mode. A thread starts with the mode of the thread that made it, so each
// thread of a team needs its own object.
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
  // A call, because the compiler does not move arithmetic across it; it is rare, so it is cheap.
  [[gnu::noinline, gnu::cold]] static void set(unsigned mode) {
    __builtin_ia32_ldmxcsr(mode);
    asm volatile("" ::: "memory");
  }
  const unsigned before_;
};

}  // namespace bittern
