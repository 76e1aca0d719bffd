// Whether a sanitizer watches this program: times and memory are then not what users see.
#pragma once

namespace deepinfer {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kHasSanitizer = true;
#else
inline constexpr bool kHasSanitizer = false;
#endif

}  // namespace deepinfer
