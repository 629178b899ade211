// For tests: BITTERN_SANITIZED where a sanitizer maps more memory than any limit allows. GCC has
// macros for it, clang features.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BITTERN_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BITTERN_SANITIZED
#endif
#endif
