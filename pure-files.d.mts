export const PURE_FILES: readonly string[];
