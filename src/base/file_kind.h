// What a path is when it is not the regular file it should be, in words for a message.
#pragma once

#include <sys/stat.h>

#include <string_view>

namespace deepinfer {

// `mode` is st_mode of struct stat.
inline std::string_view FileKind(mode_t mode) {
  if (S_ISREG(mode)) return "regular file";
  if (S_ISDIR(mode)) return "directory";
  if (S_ISFIFO(mode)) return "FIFO";
  if (S_ISCHR(mode)) return "character device";
  if (S_ISBLK(mode)) return "block device";
  if (S_ISSOCK(mode)) return "socket";
  return "special file";
}

}  // namespace deepinfer
