"""The server's client: prompt tokens in, one `Turn` out, with everything training needs recorded when it was sampled."""
